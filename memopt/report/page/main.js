"use strict";
/* The page's state, and what the reader does with it: slider, mouse, keyboard, colours. */

class Explorer {
  constructor(data, plots) {
    this.data = data;
    this.plots = plots;
    this.steps = new Map();
    this.pinned = false;
    this.moment = 0;
    this.stacked = "kind";
  }

  /** A program worked out, kept for the next time. */
  step(number) {
    if (!this.steps.has(number)) this.steps.set(number, expandProgram(this.data, number));
    return this.steps.get(number);
  }

  get plan() { return this.data.plans[this.number]; }
  get now() { return this.step(this.plan.program); }

  start() {
    const { curve, opened } = this.data;
    const choice = byId("choice");
    choice.append(element("option", { value: "", text: "the fastest of all" }),
      ...curve.strategies.map((name) => element("option", { value: name, text: name })));
    choice.parentElement.hidden = curve.strategies.length < 2;
    choice.addEventListener("change", () => { this.slide(); });
    byId("slider").addEventListener("input", () => {
      this.open(this.points[Number(byId("slider").value)].plan);
    });
    for (const radio of document.querySelectorAll("input[name=stacked]")) {
      radio.addEventListener("change", () => { this.stacked = radio.value; this.draw(); });
    }
    this.mouse();
    byId("step-plot").addEventListener("keydown", (event) => this.key(event));
    byId("theme").addEventListener("click", () => this.switchTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener(
      "change", () => this.plots.theme());
    this.plots.curve();
    const legends = curve.strategies.map((name, i) => ({
      name, color: this.data.colors.curves[i % this.data.colors.curves.length] }));
    legend("curve-legend", [...legends, { name: "without memopt", kind: "star" },
      ...(this.plots.capacityShown ? [{ name: "the device's memory", kind: "solid" }] : []),
      ...(curve.bounds.length ? [{ name: "faster than the bound", color: this.data.colors.rest,
                                   kind: "faint" }] : [])]);
    this.plots.theme();
    showCheck(this.data);
    this.open(opened);
    this.slide();
  }

  /** Opens a plan: everything on the page is about it. */
  open(number) {
    this.number = number;
    this.pinned = false;
    this.moment = this.now.program.peak ?? 0;
    showFigures(this.data, this.plan, this.now);
    showModules(this.now);
    showNext(this.plan, (plan) => { this.open(plan); this.slide(); });
    this.plots.opened(this.plan);
    this.slider();
    this.draw();
  }

  /** The plans that the slider goes over: a strategy's, by peak. */
  slide() {
    const choice = byId("choice");
    this.points = pointsOf(this.data, choice.value || null);
    if (!this.points.some((cell) => cell.plan === this.number) && !choice.value) {
      // A plan that others beat is on its own strategy's curve.
      const own = this.data.curve.cells.find((cell) => cell.plan === this.number);
      if (own) {
        choice.value = own.strategy;
        this.points = pointsOf(this.data, own.strategy);
      }
    }
    byId("slider").max = String(Math.max(0, this.points.length - 1));
    if (!this.points.some((cell) => cell.plan === this.number) && this.points.length) {
      this.open(this.points[this.points.length - 1].plan);
    } else this.slider();
  }

  slider() {
    if (!this.points) return;
    const slider = byId("slider"), { plan } = this;
    const at = this.points.findIndex((cell) => cell.plan === this.number);
    if (at >= 0) slider.value = String(at);
    const text = `${plan.strategy}: peak ${formatBytes(plan.peak_bytes)}, ` +
      `${formatSeconds(plan.step_time_s)} (${signed(plan.overhead)})`;
    slider.setAttribute("aria-valuetext", text);
    byId("slider-text").textContent =
      `${text}, plan ${at + 1} of ${this.points.length}`;
  }

  layers() {
    const step = this.now, { layers, curves, rest } = this.data.colors;
    if (this.stacked === "kind") {
      return stackByKind(this.data, step).map((one) => ({ ...one, color: layers[one.name] }));
    }
    const colors = [rest, ...curves.filter((color) => color !== rest)];
    return stackByModule(step, colors.length).map((one, i) => ({ ...one, color: colors[i] }));
  }

  /** The step's pictures. */
  draw() {
    const step = this.now, layers = this.layers(), peak = step.program.peak;
    const own = this.data.check && this.number === this.data.opened ? this.data.check : null;
    const beside = step.graph.own_program === this.plan.program
      ? null : this.step(step.graph.own_program);
    const spans = this.plots.memory(step, layers, this.plan, beside, own);
    legend("stream-legend", spans.map((name) => ({
      name, color: this.data.colors.spans[name], kind: name === "recomputed" ? "hatched" : "" })));
    legend("stack-legend", [...layers.filter((one) => one.bytes.some((size) => size > 0))
      .map((one) => ({ ...one, value: peak === null ? undefined : one.bytes[peak] })).reverse(),
      ...(beside ? [{ name: "nothing recomputed", kind: "line" }] : []),
      ...(this.plan.budget_bytes === null ? [] : [{ name: "budget", kind: "dashes" }]),
      ...(own ? [{ name: "measured peak", kind: "dashes" }] : [])]);
    this.show(this.moment);
  }

  /** Shows a moment, and marks it in the pictures. */
  show(m) {
    const step = this.now;
    this.moment = Math.max(0, Math.min(step.count - 1, m));
    if (!step.count) return;
    showMoment(this.data, this.plan, step, this.moment, this.pinned);
    this.cursor();
    const what = whatHappens(step, this.moment);
    byId("step-plot").setAttribute("aria-valuetext",
      `${what.text}: ${formatBytes(step.total[this.moment])} in memory`);
    byId("step-plot").setAttribute("aria-valuenow", String(this.moment));
    byId("step-plot").setAttribute("aria-valuemax", String(step.count - 1));
  }

  cursor() {
    const step = this.now;
    const at = this.plots.units.in_steps ? this.moment
      : (this.plots.at(step.start[this.moment]) + this.plots.at(step.end[this.moment])) / 2;
    this.plots.cursor(at);
  }

  mouse() {
    const here = (event) => (this.plots.units.in_steps ? Math.floor(event.x)
      : momentAt(this.now, event.x / this.plots.units.time.size));
    for (const name of ["memory", "streams"]) {
      const figure = this.plots.model(name);
      figure.on_event("mousemove", (event) => {
        if (!this.pinned) this.show(here(event));
      });
      figure.on_event("tap", (event) => {
        this.pinned = !(this.pinned && here(event) === this.moment);
        this.show(here(event));
      });
    }
    const again = () => { if (this.plots.marked !== undefined) this.plots.cursor(this.plots.marked); };
    this.plots.model("time").change.connect(again);
    new ResizeObserver(() => requestAnimationFrame(again)).observe(byId("step-plot"));
    this.plots.model("curve").on_event("tap", (event) => this.nearest(event.x, event.y));
  }

  /** Opens the plan whose point is nearest. */
  nearest(x, y) {
    const { memory, time } = this.plots.units, figure = this.plots.model("curve");
    const wide = figure.x_range.end - figure.x_range.start;
    const high = figure.y_range.end - figure.y_range.start;
    let [best, least] = [null, 0.05];
    for (const cell of this.data.curve.cells.filter((one) => one.plan !== null)) {
      const far = Math.hypot((cell.peak_bytes / memory.size - x) / wide,
                             (cell.step_time_s * time.size - y) / high);
      if (far < least) [best, least] = [cell.plan, far];
    }
    if (best !== null) { this.open(best); this.slide(); }
  }

  key(event) {
    const { count, program } = this.now;
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 25, PageUp: -25,
                    Home: -count, End: count };
    if (event.key in moves) this.pinned = true;
    else if (event.key === "Escape") this.pinned = false;
    else if (event.key === "Enter" || event.key === " ") this.pinned = !this.pinned;
    else if (event.key !== "p") return;
    event.preventDefault();
    this.show(event.key === "p" ? program.peak ?? 0 : this.moment + (moves[event.key] ?? 0));
  }

  switchTheme() {
    const root = document.documentElement;
    const dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
    root.dataset.theme = dark ? "light" : "dark";
    byId("theme").setAttribute("aria-pressed", String(!dark));
    this.plots.theme();
  }
}

async function main() {
  const read = (id) => JSON.parse(byId(id).textContent);
  const data = read("data");
  const explorer = new Explorer(data, await Plots.draw(data, read("figures")));
  explorer.start();
  globalThis.memoptReport = { data, explorer, expandProgram, formatBytes, formatSeconds,
                              inMemory, whyThere };
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => {
  byId("failed").hidden = false;
  byId("failed").textContent = `This page could not be drawn: ${error.message}`;
  throw error;
});
