// The numbers of the explorer of a run's page: localization maps resized, scaled and compared with a threshold.
//
// They follow score_maps (models/localization.py), resample (models/resampling.py) and map_counts (models/counts.py),
// and tests in a browser hold them against these.
"use strict";
const IGNORE = 255;

async function unpacked(text, Type) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

function cubic(distance) {
  const a = -0.75;
  if (distance <= 1) return ((a + 2) * distance - (a + 3)) * distance ** 2 + 1;
  return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a;
}

/** For each of `count` pixels of a side: the four positions of a grid that it is made of, and their weights. */
function taps(grid, count) {
  return Array.from({ length: count }, (_, pixel) => {
    const at = ((pixel + 0.5) / count - grid.first) / grid.step;
    const below = Math.floor(at);
    return [-1, 0, 1, 2].map((tap) => ({
      position: Math.min(Math.max(below + tap, 0), grid.positions - 1),
      weight: Math.fround(cubic(Math.abs(at - (below + tap)))),
    }));
  });
}

/** A map (h x w positions) at the pixels of its image, bicubic. */
function resized(map, rows, columns, width) {
  const across = new Float32Array(rows.length * width);
  rows.forEach((row, y) => {
    for (let x = 0; x < width; x++) {
      let sum = 0;
      for (const { position, weight } of row) sum += weight * map[position * width + x];
      across[y * width + x] = sum;
    }
  });
  const out = new Float32Array(rows.length * columns.length);
  columns.forEach((column, x) => {
    for (let y = 0; y < rows.length; y++) {
      let sum = 0;
      for (const { position, weight } of column) sum += weight * across[y * width + position];
      out[y * columns.length + x] = sum;
    }
  });
  return out;
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b));
const smallest = (values) => values.reduce((a, b) => Math.min(a, b));
const SCALES = {
  maximum: (map) => {
    const top = Math.max(largest(map), Math.fround(1e-6));
    return map.map((value) => Math.max(value, 0) / top);
  },
  range: (map) => {
    const low = smallest(map);
    const span = Math.max(Math.fround(largest(map) - low), Math.fround(1e-6));
    return map.map((value) => Math.fround(value - low) / span);
  },
  logarithm: (map) =>
    map.map((value) => Math.min(Math.max((1 + (Math.sign(value) * Math.log1p(Math.abs(value))) / 7) / 2, 0), 1)),
};

/** Decodes an image's arrays: a score per map and pixel, the strongest map's label and interval, and the truth. */
async function decoded(image, data) {
  const [down, along] = image.grids;
  const values = await unpacked(image.maps, Float32Array);
  const rows = taps(down, image.height);
  const columns = taps(along, image.width);
  const size = down.positions * along.positions;
  image.scores = image.labels.map((_, number) =>
    SCALES[data.scale](resized(values.subarray(number * size, (number + 1) * size), rows, columns, along.positions)),
  );
  image.strongest = new Uint8Array(image.height * image.width).fill(image.labels[0]);
  const top = image.scores[0].slice();
  image.scores.slice(1).forEach((scores, number) => {
    scores.forEach((score, pixel) => {
      if (score > top[pixel]) {
        top[pixel] = score;
        image.strongest[pixel] = image.labels[number + 1];
      }
    });
  });
  image.interval = Uint16Array.from(top, (score) => Math.min(Math.floor(score * data.bins), data.bins - 1));
  image.known = image.truth && (await unpacked(image.truth, Uint8Array));
}

/** An image's labels at a threshold, counted in intervals. */
const maskOf = (image, threshold) =>
  image.strongest.map((label, pixel) => (image.interval[pixel] >= threshold ? label : 0));

/** Of each label in truth or mask its IoU in percent; null without a truth. */
function ious(image, mask) {
  if (!image.known) return null;
  const [both, truth, predicted] = [0, 0, 0].map(() => new Uint32Array(256));
  image.known.forEach((label, pixel) => {
    if (label === IGNORE) return;
    truth[label]++;
    predicted[mask[pixel]]++;
    if (label === mask[pixel]) both[label]++;
  });
  const found = new Map();
  for (let label = 0; label < IGNORE; label++) {
    const union = truth[label] + predicted[label] - both[label];
    if (union) found.set(label, (100 * both[label]) / union);
  }
  return found;
}

const meanOf = (found) => (found && found.size ? [...found.values()].reduce((a, b) => a + b) / found.size : null);
const inPercent = (value) => (value === null || value === undefined ? "\u2013" : value.toFixed(1));
