"use strict";
/* Bokeh's figures, filled from the page's data. */

const LANES = ["compute", "to host", "from host", "network", "host"];
const KINDS = ["to host", "from host", "collectives", "updates on the host"];

class Plots {
  constructor(data, models) {
    this.data = data;
    this.model = (name) => {
      for (const document of models) {
        const found = document.get_model_by_name(name);
        if (found) return found;
      }
      throw new Error(`no model ${name}`);
    };
    this.units = data.units;
  }

  static async draw(data, items) {
    await Bokeh.embed.embed_item(items.curve, byId("curve-plot"));
    await Bokeh.embed.embed_item(items.step, byId("step-plot"));
    return new Plots(data, Bokeh.documents);
  }

  /** The colours of text and lines, from the page's style. */
  theme() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim();
    const faint = style.getPropertyValue("--line").trim();
    for (const name of ["curve", "memory", "streams"]) {
      const figure = this.model(name);
      for (const axis of [...figure.below, ...figure.left]) {
        axis.setv({ axis_label_text_color: text, major_label_text_color: text,
                    axis_line_color: faint, major_tick_line_color: faint });
      }
      for (const grid of figure.center.filter((one) => "grid_line_color" in one)) {
        grid.grid_line_color = faint;
      }
    }
    this.model("baseline mark").glyph.setv({ fill_color: text, line_color: text });
    this.model("measured mark").glyph.setv({ line_color: text });
    this.model("ring mark").glyph.setv({ line_color: text });
    this.model("other line").glyph.line_color = text;
    this.model("peak mark").glyph.setv({ fill_color: text, line_color: text });
    this.model("backward").line_color = text;
  }

  fill(name, columns) { this.model(name).data = columns; }

  /** The curve: every plan a point, the bound shaded, measured figures beside the predicted. */
  curve() {
    const { curve } = this.data, { memory, time } = this.units;
    curve.strategies.forEach((strategy, number) => {
      if (number >= 3 * this.data.colors.curves.length) return;
      const cells = pointsOf(this.data, strategy);
      this.fill(`line${number}`, { x: cells.map((cell) => cell.peak_bytes / memory.size),
                                   y: cells.map((cell) => cell.step_time_s * time.size) });
    });
    const baselines = [curve.baseline, curve.measured_baseline].filter(Boolean);
    this.fill("baseline", { x: baselines.map((one) => one.peak_bytes / memory.size),
                            y: baselines.map((one) => one.step_time_s * time.size) });
    const run = curve.cells.filter((cell) => cell.measured_time_s !== null);
    this.fill("measured", { x: run.map((cell) => cell.measured_peak_bytes / memory.size),
                            y: run.map((cell) => cell.measured_time_s * time.size) });
    const capacity = this.data.device.capacity_bytes;
    const drawn = [...curve.cells, ...baselines].map((one) => one.peak_bytes ?? 0);
    // One that no point comes near would be far outside the axis.
    this.capacityShown = capacity !== null && capacity <= Math.max(...drawn);
    this.span("capacity", this.capacityShown ? capacity / memory.size : null);
    this.fill("bound", boundBoxes(curve, memory.size, time.size));
  }

  /** Rings the opened plan and draws its budget. */
  opened(plan) {
    const { memory, time } = this.units, budget = this.model("budget of the curve");
    this.fill("ring", { x: [plan.peak_bytes / memory.size], y: [plan.step_time_s * time.size] });
    budget.visible = plan.budget_bytes !== null;
    if (budget.visible) budget.location = plan.budget_bytes / memory.size;
  }

  /** Time of a moment's start on the axis. */
  at(seconds) { return this.units.in_steps ? seconds : seconds * this.units.time.size; }

  timesOf(step) {
    if (this.units.in_steps) return Float64Array.from({ length: step.count + 1 }, (_, m) => m);
    const times = new Float64Array(step.count + 1);
    for (let m = 0; m < step.count; m++) times[m] = this.at(step.start[m]);
    times[step.count] = this.at(step.program.time_s);
    return times;
  }

  /** The stack of one plan's memory, with its budget, peak and where its backward begins. */
  memory(step, layers, plan, beside, check) {
    const x = this.timesOf(step), unit = this.units.memory.size, columns = { x };
    let base = new Float64Array(step.count + 1);
    columns.l0 = base;
    for (let number = 0; number < 10; number++) {
      const layer = layers[number], renderer = this.model(`layer${number}`);
      renderer.visible = Boolean(layer && layer.bytes.some((size) => size > 0));
      if (layer) {
        const top = new Float64Array(step.count + 1);
        for (let m = 0; m < step.count; m++) top[m] = base[m] + layer.bytes[m] / unit;
        top[step.count] = step.count ? top[step.count - 1] : 0;
        base = top;
        renderer.glyph.fill_color = layer.color;
        renderer.glyph.fill_alpha = layer.alpha ?? 1;
      }
      columns[`l${number + 1}`] = base;
    }
    this.fill("stack", columns);
    this.fill("other", beside ? { x: this.timesOf(beside), y: padded(beside.total, unit) }
                              : { x: [], y: [] });
    this.span("budget", plan.budget_bytes === null ? null : plan.budget_bytes / unit);
    this.span("measured peak", check ? check.measured_peak_bytes / unit : null);
    this.span("backward", step.program.backward_s === null || this.units.in_steps
      ? null : this.at(step.program.backward_s));
    const peak = step.program.peak;
    this.fill("peak", peak === null ? { x: [], y: [] } : { x: [x[peak]], y: [base[peak]] });
    const tops = [step.total, beside ? beside.total : []];
    const highest = Math.max(plan.budget_bytes ?? 0, check ? check.measured_peak_bytes : 0,
                             ...tops.map((one) => one.reduce((a, b) => Math.max(a, b), 0)));
    this.model("bytes").setv({ start: 0, end: (1.06 * highest) / unit || 1 });
    const last = Math.max(x[step.count], beside ? this.timesOf(beside)[beside.count] : 0);
    const measured = this.data.measured && check ? this.data.measured : [];
    const longest = measured.reduce((end, span) => Math.max(end, this.at(span[3])), last);
    this.model("time").setv({ start: 0, end: longest || 1, bounds: [0, longest || 1],
                              reset_start: 0, reset_end: longest || 1 });
    return this.streams(step, x, measured);
  }

  /** Marks a time in both figures of the step: a line over them, for which nothing is redrawn. */
  cursor(x) {
    this.marked = x;
    const line = byId("cursor"), plot = byId("step-plot").getBoundingClientRect();
    const { frame, canvas_view } = Bokeh.index.find_one(this.model("memory"));
    const canvas = canvas_view.el.getBoundingClientRect();
    const left = frame.x_scale.compute(x);
    line.hidden = !(left >= frame.bbox.left && left <= frame.bbox.right);
    line.style.transform = `translateX(${canvas.left - plot.left + left}px)`;
  }

  span(name, location) {
    const span = this.model(name);
    span.visible = location !== null;
    if (location !== null) span.location = location;
  }

  /** Compute and copies by kind; under them, where there is one, the recorded step's. The kinds
      that there are. */
  streams(step, x, measured) {
    const kinds = new Map(Object.keys(this.data.colors.spans).map((kind) => [kind, []]));
    const lanes = lanesOf(step);
    for (let m = 0; m < step.count; m++) {
      if (step.codes[m] < WAIT) continue;
      const kind = step.codes[m] === WAIT ? "waiting" : runKind(step, m);
      const end = this.units.in_steps ? m + 1 : this.at(step.end[m]);
      if (end > x[m]) kinds.get(kind).push([x[m], end, 0]);
    }
    if (!this.units.in_steps) {
      for (const [, stream, start, end] of step.program.copies) {
        kinds.get(KINDS[stream]).push(
          [this.at(start), this.at(end), lanes.indexOf(LANES[1 + stream])]);
      }
    }
    if (measured.length) {
      const first = lanes.length;
      const used = LANES.filter((lane) => measured.some((span) => span[0] === lane));
      for (const lane of used) lanes.push(`measured ${lane}`);
      for (const [kind, lane, start, end] of measuredSpans(step, measured)) {
        kinds.get(kind).push([this.at(start), this.at(end), first + used.indexOf(lane)]);
      }
    }
    for (const [kind, spans] of kinds) {
      this.fill(`spans ${kind}`, {
        left: spans.map((span) => span[0]), right: spans.map((span) => span[1]),
        top: spans.map((span) => span[2] - 0.4), bottom: spans.map((span) => span[2] + 0.4) });
    }
    this.model("lanes").setv({ start: lanes.length - 0.5, end: -0.5 });
    const axis = this.model("streams").left[0];
    this.model("lane ticks").ticks = lanes.map((_, number) => number);
    axis.major_label_overrides = new Map(lanes.map((lane, number) => [number, lane]));
    this.model("streams").height = 70 + 34 * lanes.length;
    return [...kinds.keys()].filter((kind) => kinds.get(kind).length > 0);
  }
}

function padded(total, unit) {
  const values = Float64Array.from(total, (size) => size / unit);
  return values.length ? [...values, values[values.length - 1]] : [];
}

/** A strategy's points, by peak; null: the fastest plans of all, none beaten in both figures. */
function pointsOf(data, strategy) {
  const seen = new Set(), found = [];
  const planned = data.curve.cells.filter(
    (cell) => cell.plan !== null && (strategy === null || cell.strategy === strategy));
  planned.sort((a, b) => a.peak_bytes - b.peak_bytes || a.step_time_s - b.step_time_s);
  let fastest = Infinity;
  for (const cell of planned) {
    const key = `${cell.peak_bytes} ${cell.step_time_s}`;
    if (strategy === null ? cell.step_time_s >= fastest : seen.has(key)) continue;
    fastest = cell.step_time_s;
    seen.add(key);
    found.push(cell);
  }
  return found;
}

/** What no plan within a budget reaches: under each bound, from the next smaller budget on. */
function boundBoxes(curve, memory, time) {
  const boxes = { left: [], right: [], top: [], bottom: [] };
  let left = 0;
  for (const [budget, seconds] of curve.bounds) {
    boxes.left.push(left);
    boxes.right.push(budget / memory);
    boxes.top.push(seconds * time);
    boxes.bottom.push(0);
    left = budget / memory;
  }
  return boxes;
}

/** The streams that a step uses; copies have both of theirs. */
function lanesOf(step) {
  const used = new Set([0, ...step.program.copies.map(([, stream]) => 1 + stream)]);
  if (used.has(1) || used.has(2)) used.add(1).add(2);
  return LANES.filter((_, number) => used.has(number));
}

/** A recorded step's spans as [kind, lane, start, end]; what runs for a second time is recomputed,
    and what lies between the halves of the step (the loss, autograd) stays blank. */
function measuredSpans(step, measured) {
  const numbers = new Map(step.graph.operators.name.map((name, op) => [name, op]));
  const ran = new Set(), found = [];
  for (const [lane, name, start, end, stall] of measured) {
    if (stall) found.push(["waiting", lane, start, end]);
    else if (lane !== LANES[0]) found.push([lane, lane, start, end]);
    else if (numbers.has(name)) {
      const phase = step.graph.operators.phase[numbers.get(name)];
      const kind = ran.has(name) ? "recomputed"
        : phase === BACKWARD ? "backward" : phase === UPDATE ? "update" : "forward";
      ran.add(name);
      found.push([kind, lane, start, end]);
    }
  }
  return found;
}
