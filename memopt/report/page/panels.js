"use strict";
/* The page's texts and tables. */

const MOST_ROWS = 10;

/** The figures of a plan, as tiles. */
function showFigures(data, plan, step) {
  const tile = (label, value, text, note) => element("div", { class: "tile" },
    element("span", { class: "label", text: label }),
    figureElement("strong", value, text, { "data-figure": label }),
    element("span", { class: "note", text: note ?? "" }));
  const base = plan.baseline;
  const [saved, slower] = [1 - plan.peak_bytes / base.peak_bytes, plan.overhead];
  const again = step.program.modules.reduce((sum, row) => sum + row[4], 0);
  const tiles = [
    tile("peak memory", plan.peak_bytes, formatBytes(plan.peak_bytes),
      (plan.budget_bytes === null ? "no budget" : `budget ${formatBytes(plan.budget_bytes)}`) +
      (data.device.capacity_bytes ? `; the device has ${formatBytes(data.device.capacity_bytes)}`
                                  : "")),
    tile("step time", plan.step_time_s, formatSeconds(plan.step_time_s),
      `${signed(slower)} over running every operator once`),
    tile("without memopt", base.peak_bytes, formatBytes(base.peak_bytes),
      `${formatSeconds(base.step_time_s)}, ${base.measured ? "measured" : "predicted"}; the plan ` +
      `needs ${fixed(Math.abs(100 * saved), 0)} % ${saved >= 0 ? "less" : "more"} memory`),
    tile("never moves", plan.resident_bytes, formatBytes(plan.resident_bytes),
      step.program.resident_parts.map(([what, size]) => `${what} ${formatBytes(size)}`).join(", ")),
    tile("recomputed", plan.recomputations, counted(plan.recomputations, "run"),
      `${formatSeconds(again)} of the step`),
    tile("bound", plan.lower_bound_s, formatSeconds(plan.lower_bound_s),
      `no plan of this kind is faster; this one is within ${fixed(100 * plan.gap, 1)} %`),
  ];
  if (plan.host_peak_bytes) {
    tiles.push(tile("host memory", plan.host_peak_bytes, formatBytes(plan.host_peak_bytes),
      "for tensors that move"));
  }
  byId("tiles").replaceChildren(...tiles);
  byId("strategy").textContent = plan.parameters;
  byId("notes").replaceChildren(
    ...[...data.notes, ...plan.notes].map((note) => element("li", { text: note })));
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(({ name, color, kind, value }) =>
    element("span", { class: "key" },
      element("span", { class: `swatch ${kind ?? ""}`, color }),
      element("span", { text: name }),
      ...(value === undefined ? [] : [figureElement("span", value, formatBytes(value),
        { class: "value", "data-layer": name })]))));
}

/** A moment: what runs, what memory holds, and what the operator reads and writes. */
function showMoment(data, plan, step, m, pinned) {
  const what = whatHappens(step, m), rows = inMemory(step, m);
  byId("moment-kind").textContent = pinned ? `${what.kind}, pinned` : what.kind;
  byId("moment-name").textContent = what.implementation
    ? `${what.text} (${what.implementation})` : what.text;
  const seconds = step.end[m] - step.start[m];
  const share = step.program.time_s > 0
    ? `${formatSeconds(step.start[m])} into the step, ` : "";
  byId("moment-when").replaceChildren(
    document.createTextNode(`${share}${seconds > 0 ? `takes ${formatSeconds(seconds)}, ` : ""}`),
    figureElement("b", step.total[m], formatBytes(step.total[m]), { "data-figure": "moment" }),
    document.createTextNode(step.program.peak === m ? " in memory: the peak" : " in memory"));
  const largest = rows.length ? rows[0].bytes : 1;
  const shown = rows.slice(0, MOST_ROWS).map((row) => momentRow(data, step, m, row, largest));
  const rest = rows.slice(MOST_ROWS);
  if (rest.length) {
    const size = rest.reduce((sum, row) => sum + row.bytes, 0);
    shown.push(element("li", { class: "rest" },
      figureElement("b", size, formatBytes(size)), ` ${counted(rest.length, "other")}`));
  }
  byId("moment-memory").replaceChildren(...shown);
  showOperator(step, m, what, pinned);
}

function momentRow(data, step, m, row, largest) {
  const { tensors } = step.graph, colors = data.colors.layers;
  let [name, text, why, layer] = ["", "", "", "other resident"];
  if (row.workspace) {
    [name, why, layer] = ["workspace", "scratch memory of what runs here", "workspace"];
  } else if (row.resident) {
    name = row.count ? counted(row.count, `${row.resident} tensor`) : besideTheGraph(step);
    why = "resident: there during the whole step";
    layer = row.resident === "parameter" ? "parameters" : layer;
  } else {
    name = tensorName(step, row.tensor);
    text = tensors.text[row.tensor];
    why = whyThere(step, row.lifetime, m);
    layer = data.layers[tensors.layer[row.tensor]];
  }
  const bar = element("span", { class: "bar", color: colors[layer],
                                width: `${Math.max(1, (100 * row.bytes) / largest)}%` });
  return element("li", { "data-tensor": row.tensor ?? "" },
    figureElement("b", row.bytes, formatBytes(row.bytes)),
    element("span", { class: "name", text: name }),
    element("span", { class: "detail" }, element("span", { class: "shape", text }),
      element("span", { class: "why", text: why })), bar);
}

/** What resident bytes belong to no tensor: optimizer state by its parts, and other. */
function besideTheGraph(step) {
  const inGraph = new Set(["parameters", "buffers", "inputs", "constants", "optimizer state"]);
  return step.program.resident_parts.filter(([what]) => !inGraph.has(what)).map(([what, size]) =>
    `${what} ${formatBytes(size)}`).join(", ");
}

/** What the operator of a moment reads and writes. */
function showOperator(step, m, what, pinned) {
  const box = byId("moment-operator");
  box.hidden = !pinned || what.op === undefined;
  if (box.hidden) return;
  const { graph } = step, run = step.codes[m], { tensors } = graph;
  byId("operator-target").textContent = graph.operators.target[what.op] || "";
  const list = (numbers) => numbers.map((t) => element("li", { "data-tensor": t },
    figureElement("b", tensors.bytes[t], formatBytes(tensors.bytes[t])),
    element("span", { class: "name", text: tensorName(step, t) }),
    element("span", { class: "shape", text: tensors.text[t] })));
  byId("operator-reads").replaceChildren(...list(graph.runs.reads[run]));
  byId("operator-writes").replaceChildren(...list(graph.runs.writes[run]));
}

/** The table of modules; a row's share of the memory at the peak as a bar. */
function showModules(step) {
  const rows = step.program.modules.map((row, i) => [step.graph.groups[i], ...row])
    .filter((row) => row.slice(1).some((value) => value > 0));
  const most = Math.max(1, ...rows.map((row) => row[3]));
  const size = (value) => figureElement("td", value, value ? formatBytes(value) : "–");
  byId("modules").replaceChildren(...rows.map((row) => element("tr", {},
    element("th", { scope: "row", text: row[0] }),
    size(row[1]), size(row[2]),
    element("td", { "data-value": String(row[3]), class: "with-bar" },
      element("span", { class: "bar", color: "var(--bar)", width: `${(100 * row[3]) / most}%` }),
      element("span", { text: row[3] ? formatBytes(row[3]) : "–" })),
    figureElement("td", row[4], row[4] ? counted(row[4], "run") : "–"),
    figureElement("td", row[5], row[5] ? formatSeconds(row[5]) : "–"),
    size(row[6]))));
}

/** The cheapest next steps from a plan (`next_steps`, the ladder's), those to plans as buttons. */
function showNext(plan, open) {
  const rows = plan.next.map((step) => {
    const figures = { text: step.text, "data-bytes": step.bytes, "data-share": step.share };
    if (step.plan === null) return element("li", figures);
    const click = () => open(step.plan);
    return element("li", {}, element("button", { type: "button", ...figures, click }));
  });
  const none = [element("li", { text: "No cheaper neighbour among the plans of this page." })];
  byId("next").replaceChildren(...(rows.length ? rows : none));
}

/** Predicted beside measured. */
function showCheck(data) {
  const { check } = data;
  byId("measured").hidden = !check;
  if (!check) return;
  const row = (name, predicted, measured, write) => element("tr", {},
    element("th", { scope: "row", text: name }),
    figureElement("td", predicted, write(predicted)), figureElement("td", measured, write(measured)),
    element("td", { text: fixed(measured / predicted, 3) }));
  byId("check").replaceChildren(
    row("peak", check.predicted_peak_bytes, check.measured_peak_bytes, formatBytes),
    row("step time", check.predicted_time_s, check.measured_time_s, formatSeconds));
}
