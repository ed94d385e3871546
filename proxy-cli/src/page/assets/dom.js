// Elements and text. Names of objects are untrusted input: they become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

// The text before a node has sent data.
export const WAITING = "Waiting for data.";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Creates an element: el("td", { class: "number" }, "12")
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Sets the text only if it differs, so that the user's selection is kept.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

const UNITS = ["", "k", "M", "G", "T"];

// Formats a number with at most five characters: 0, 0.25, 7.5, 120, 3.4k, 1.2M.
export function rate(value) {
  let unit = 0;
  while (value >= 999.5 && unit + 1 < UNITS.length) {
    value /= 1000;
    unit += 1;
  }
  if (value < 0.005) return "0";
  if (unit === 0 && value < 0.995) return value.toFixed(2);
  return (value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + UNITS[unit];
}

export function bytes(value) {
  const text = rate(value);
  return /[kMGT]$/.test(text) ? `${text.slice(0, -1)} ${text.slice(-1)}B` : `${text} B`;
}

export function whole(value) {
  return value.toLocaleString("en-US");
}

export function percent(part) {
  return `${Math.round(part * 100)} %`;
}

export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

// Makes the elements the only children of the parent, in this order; keeps the focus.
export function arrange(parent, elements) {
  const focused = document.activeElement;
  let place = parent.firstChild;
  for (const element of elements) {
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}
