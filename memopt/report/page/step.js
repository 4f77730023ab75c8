"use strict";
/* A plan's step, worked out from the page's data: when each moment is, what memory holds during it
   and why. Nothing here touches the document. */

const WAIT = -1, LOSS = -2, MOVED = 3;
const TRANSIENT = 1, FETCHED = 2, TAKES_OVER = 4, STAYS = 8, TANGENT = 16;
const BACKWARD = 1, UPDATE = 2;

/** The first index at which a sorted array exceeds a value. */
function upperBound(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

/** A program's moments in seconds and bytes; see memopt/report/page/steps.py for the coding. */
function expandProgram(data, number) {
  const program = data.programs[number], graph = data.graphs[program.graph];
  const codes = program.moments, count = codes.length;
  const start = new Float64Array(count), end = new Float64Array(count);
  const workspace = new Float64Array(count);
  let now = 0, waits = 0;
  for (let m = 0; m < count; m++) {
    const code = codes[m];
    if (code === WAIT) {
      [start[m], end[m]] = program.waits[waits++];
    } else {
      start[m] = now;
      end[m] = code >= 0 ? now + graph.runs.time_s[code] : now;
    }
    now = end[m];
    if (code >= 0) workspace[m] = graph.runs.workspace_bytes[code];
    else if (code === LOSS) workspace[m] = graph.boundary_bytes;
  }
  const rows = program.lifetimes.length / 4;
  const lives = { tensor: new Int32Array(rows), begin: new Int32Array(rows),
                  end: new Int32Array(rows), flags: new Int32Array(rows) };
  for (let i = 0, begin = 0; i < rows; i++) {
    begin += program.lifetimes[4 * i + 1];
    lives.tensor[i] = program.lifetimes[4 * i];
    lives.begin[i] = begin;
    lives.end[i] = begin + program.lifetimes[4 * i + 2];
    lives.flags[i] = program.lifetimes[4 * i + 3];
  }
  const step = { program, graph, codes, count, start, end, workspace, lives, number };
  Object.assign(step, usesOf(step));
  step.total = sums(stackOf(step, () => 0, () => 0, () => 0, 1));
  return step;
}

/** Which moments read a tensor, run an operator, or copy a tensor to the host. */
function usesOf(step) {
  const readers = new Map(), runsOf = new Map(), copiedAt = new Map();
  const enter = (map, key, m) => { map.has(key) ? map.get(key).push(m) : map.set(key, [m]); };
  step.codes.forEach((code, m) => {
    if (code >= 0) {
      enter(runsOf, step.graph.runs.op[code], m);
      for (const tensor of step.graph.runs.reads[code]) enter(readers, tensor, m);
    } else if (code <= -MOVED && (-code - MOVED) % 3 === 0) {
      enter(copiedAt, (-code - MOVED) / 3, m);
    }
  });
  return { readers, runsOf, copiedAt };
}

/** Bytes during each moment in each of `layers` layers: lists of `step.count` numbers. */
function stackOf(step, layerOfTensor, layerOfWorkspace, layerOfExtra, layers) {
  const { graph, lives, count } = step;
  const bytes = graph.tensors.bytes;
  const stack = Array.from({ length: layers }, () => new Float64Array(count + 1));
  for (const tensor of step.program.resident) stack[layerOfTensor(tensor)][0] += bytes[tensor];
  stack[layerOfExtra()][0] += graph.extra_resident_bytes;
  for (let i = 0; i < lives.tensor.length; i++) {
    const layer = stack[layerOfTensor(lives.tensor[i])], size = bytes[lives.tensor[i]];
    layer[lives.begin[i]] += size;
    layer[lives.end[i]] -= size;
  }
  for (const layer of stack) for (let m = 1; m < count; m++) layer[m] += layer[m - 1];
  for (let m = 0; m < count; m++) if (step.workspace[m]) {
    stack[layerOfWorkspace(m)][m] += step.workspace[m];
  }
  return stack.map((layer) => layer.subarray(0, count));
}

function sums(stack) {
  const total = new Float64Array(stack[0].length);
  for (const layer of stack) for (let m = 0; m < total.length; m++) total[m] += layer[m];
  return total;
}

/** By what it holds (data.layers), as the memory plot does. */
function stackByKind(data, step) {
  const workspace = data.layers.indexOf("workspace"), extra = data.layers.indexOf("other resident");
  const layer = step.graph.tensors.layer;
  const stack = stackOf(step, (t) => layer[t], () => workspace, () => extra, data.layers.length);
  return data.layers.map((name, i) => ({ name, bytes: stack[i] }));
}

/** By module: those that hold most at the peak, in the model's order, above all others
    as one. */
function stackByModule(step, most) {
  const { graph } = step, count = graph.groups.length;
  const ownerOf = (m) => (step.codes[m] >= 0
    ? graph.operators.group[graph.runs.op[step.codes[m]]] : count);
  const all = stackOf(step, (t) => graph.tensors.group[t], ownerOf, () => count, count + 1);
  const peak = step.program.peak ?? 0;
  const numbers = [...all.keys()].slice(0, count);
  const largest = new Set(numbers.sort((a, b) => all[b][peak] - all[a][peak]).slice(0, most - 1));
  const shown = [...all.keys()].filter((i) => largest.has(i));
  const rest = [...all.keys()].filter((i) => !largest.has(i)).map((i) => all[i]);
  return [{ name: "everything else", bytes: sums(rest) },
          ...shown.map((i) => ({ name: graph.groups[i], bytes: all[i] }))];
}

/** The moment at a time, the last one that has started. */
function momentAt(step, seconds) {
  return Math.max(0, upperBound(step.start, seconds) - 1);
}

const named = (module, name) => (module ? `${module}: ${name}` : name);

function operatorName(step, op) {
  const { operators, modules } = step.graph;
  return named(modules[operators.module[op]], operators.name[op]);
}

function tensorName(step, tensor) {
  const { tensors, modules } = step.graph;
  const own = tensors.name[tensor], module = modules[tensors.module[tensor]];
  return own.startsWith(module + ".") ? own : named(module, own);
}

/** What happens at a moment: a word, and the operator or tensor. */
function whatHappens(step, m) {
  const code = step.codes[m];
  if (code === WAIT) return { kind: "waiting for a copy", text: "the compute stream waits" };
  if (code === LOSS) return { kind: "the loss", text: "your loss; the backward begins" };
  if (code < 0) {
    const tensor = Math.floor((-code - MOVED) / 3);
    const words = ["to host", "from host", "host copy dropped"];
    return { kind: words[(-code - MOVED) % 3], text: tensorName(step, tensor) };
  }
  const op = step.graph.runs.op[code];
  return { kind: runKind(step, m), text: operatorName(step, op), op,
           implementation: step.graph.runs.implementation[code] };
}

function runKind(step, m) {
  const op = step.graph.runs.op[step.codes[m]], phase = step.graph.operators.phase[op];
  if (step.runsOf.get(op)[0] < m) return "recomputed";
  return phase === BACKWARD ? "backward" : phase === UPDATE ? "update" : "forward";
}

/** How often the operator that computes a tensor runs again in the step, and for how long. */
function runsAgain(step, tensor) {
  const op = step.graph.tensors.producer[tensor];
  const again = (step.runsOf.get(op) ?? []).slice(1);
  const seconds = again.reduce((sum, m) => sum + step.graph.runs.time_s[step.codes[m]], 0);
  return { count: again.length, seconds };
}

/** The first moment from `m` on at which a lifetime's tensor is read; null if there is none. */
function nextReader(step, i, m) {
  const { tensor, end } = step.lives, reads = step.readers.get(tensor[i]) ?? [];
  const at = reads[upperBound(reads, m - 1)];
  // What an operator computes over is read by the operator that ends it.
  return at !== undefined && at <= end[i] ? at : null;
}

/** Why a lifetime is in memory at a moment, in words. */
function whyThere(step, i, m) {
  const { tensor, begin, end, flags } = step.lives, t = tensor[i];
  if (flags[i] & TRANSIENT) return "written here, not kept";
  const parts = [place(step, i, m)];
  const again = runsAgain(step, t);
  if (again.count) parts.push(`recomputed ${again.count}× for ${formatSeconds(again.seconds)}`);
  if (flags[i] & TAKES_OVER) parts.push("in the storage of what it was computed from");
  return parts.join("; ");
}

function place(step, i, m) {
  const { tensor, begin, flags } = step.lives, t = tensor[i], now = step.start[m];
  const copies = step.program.copies.filter((x) => x[0] === t && x[2] >= step.start[begin[i]]);
  const next = nextReader(step, i, m);
  const whom = (at) => operatorName(step, step.graph.runs.op[step.codes[at]]);
  const inward = copies.find((x) => x[1] === 1), outward = copies.find((x) => x[1] === 0);
  if (flags[i] & FETCHED && inward && inward[3] > now) {
    return `being fetched from the host${next === null ? "" : ` for ${whom(next)}`}`;
  }
  const left = (step.copiedAt.get(t) ?? []).find((at) => at >= begin[i] && at < step.lives.end[i]);
  if (next === null && left !== undefined && left <= m) {
    return outward && outward[3] > now ? "being moved to the host" : "moved to the host";
  }
  if (next === m) return `read here${begin[i] === m ? " and written" : ""}`;
  if (begin[i] === m) return next === null ? "written here" : `written here, for ${whom(next)}`;
  if (next !== null) return `kept for ${whom(next)}`;
  if (flags[i] & STAYS) return "a result of the step";
  return flags[i] & TANGENT ? "the loss's gradient" : "about to be freed";
}

/** Everything in memory during a moment, largest first; resident tensors as one row a kind. */
function inMemory(step, m) {
  const { graph, lives } = step, { bytes, kind } = graph.tensors, rows = [];
  for (let i = 0; i < lives.tensor.length; i++) {
    if (lives.begin[i] <= m && m < lives.end[i]) {
      rows.push({ bytes: bytes[lives.tensor[i]], tensor: lives.tensor[i], lifetime: i });
    }
  }
  const kinds = new Map();
  for (const tensor of step.program.resident) {
    const row = kinds.get(kind[tensor]) ?? { bytes: 0, count: 0, resident: kind[tensor] };
    row.bytes += bytes[tensor];
    row.count += 1;
    kinds.set(kind[tensor], row);
  }
  rows.push(...kinds.values());
  if (graph.extra_resident_bytes) {
    rows.push({ bytes: graph.extra_resident_bytes, count: 0, resident: "beside the graph" });
  }
  if (step.workspace[m]) rows.push({ bytes: step.workspace[m], workspace: true });
  return rows.filter((row) => row.bytes > 0).sort((a, b) => b.bytes - a.bytes);
}
