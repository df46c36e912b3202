// What the scripts of a run's page share: its data, and functions that decode arrays and draw.
//
// The JSON in #explore-data is written by explorer.py. Text from outside is only set as textContent; the policy of the
// page forbids everything else.
"use strict";
const IGNORE = 255;
const data = JSON.parse(document.getElementById("explore-data").textContent);

async function unpacked(text, Type) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

const nameOf = (label) => data.labels[label].name;
const colorOf = (label) => [1, 3, 5].map((at) => parseInt(data.labels[label].color.slice(at, at + 2), 16));

/** A label's color, bright enough to be seen over a dark picture. */
function brightOf(label) {
  const color = colorOf(label);
  return color.map((value) => Math.min(255, (value * 255) / Math.max(...color, 1)));
}

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function named(label) {
  const made = element("span", "name");
  const swatch = element("i", label === IGNORE ? "swatch ignored" : "swatch");
  if (label !== IGNORE) swatch.style.background = data.labels[label].color;
  made.append(swatch, element("span", "", nameOf(label)));
  return made;
}

function picture(source, text) {
  const made = element("img");
  made.src = source;
  made.alt = text;
  return made;
}

/** Paints a packed color for each pixel of an image on a canvas of its size. */
function paint(canvas, { width, height }, color) {
  canvas.width = width;
  canvas.height = height;
  const pixels = new ImageData(width, height);
  const words = new Uint32Array(pixels.data.buffer);
  for (let pixel = 0; pixel < words.length; pixel++) words[pixel] = color(pixel);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

const packed = ([red, green, blue], opacity) => ((opacity << 24) | (blue << 16) | (green << 8) | red) >>> 0;

function line(head, value) {
  const made = element("div");
  const term = element("span", "muted");
  const description = element("b");
  term.append(head);
  description.append(value);
  made.append(term, description);
  return made;
}

/** Shows lines next to a point of the window, and returns the tooltip. */
function showTip(lines, left, top) {
  const tip = document.getElementById("explore-tip");
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${left + 16 + width > innerWidth ? left - 12 - width : left + 16}px`;
  tip.style.top = `${Math.max(4, Math.min(top + 14, innerHeight - height - 4))}px`;
  return tip;
}

const hideTip = () => (document.getElementById("explore-tip").hidden = true);

/** Calls `point` with the position of the pointer over an element, in fractions of its sides, and in the window. */
function watch(target, point, leave) {
  target.addEventListener("pointermove", (event) => {
    const box = target.getBoundingClientRect();
    const [across, down] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    point(across, down, event.clientX, event.clientY);
  });
  target.addEventListener("pointerleave", leave);
}

/** Calls `point` for a position that arrow keys move over an element, starting in its center. */
function watchKeys(target, point, leave) {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const at = [0.5, 0.5];
  target.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (!(event.key in steps)) return;
    event.preventDefault();
    steps[event.key].forEach((step, axis) => (at[axis] = Math.min(Math.max(at[axis] + step / 32, 0), 0.999)));
    const box = target.getBoundingClientRect();
    point(...at, box.left + at[0] * box.width, box.top + at[1] * box.height);
  });
  target.addEventListener("blur", leave);
}
