"use strict";
/* Figures as memopt writes them (memopt/models/budget.py, memopt/report/texts.py), and elements. */

/** Python's rounding of half cases can differ from toFixed's; both round the binary value. */
const fixed = (value, digits) => value.toFixed(digits);

function formatBytes(bytes) {
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${fixed(size, unit === "B" ? 0 : 1)} ${unit}`;
    size /= 1024;
  }
  return `${fixed(size, 2)} TiB`;
}

function formatSeconds(seconds) {
  if (seconds >= 1) return `${fixed(seconds, 2)} s`;
  if (seconds >= 1e-3) return `${fixed(1e3 * seconds, 2)} ms`;
  return `${fixed(1e6 * seconds, 1)} µs`;
}

const signed = (share) => `${share < 0 ? "−" : "+"}${fixed(Math.abs(100 * share), 1)} %`;
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** An element with text, attributes and children. Text is never read as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "click") made.addEventListener("click", value);
    else if (name === "color") made.style.backgroundColor = value;
    else if (name === "width") made.style.width = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** An element that shows a figure and keeps it whole in data-value. */
function figureElement(tag, value, text, attributes = {}) {
  return element(tag, { "data-value": String(value), ...attributes, text });
}

const byId = (id) => document.getElementById(id);
