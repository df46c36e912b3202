// The threshold explorer of a run's page: compares localization maps with a threshold that the reader moves.
//
// Fills the section #explore, which is hidden without a script. A score is given as the number of the highest threshold
// that it reaches, so that masks and IoU agree with the program.
(() => {
  const find = (name) => document.getElementById(`explore-${name}`);
  const state = { image: null, threshold: data.start, view: "mask", settled: false };

  // ---- numbers

  /** Decodes an image's arrays: threshold reached by each map at each pixel, label of the strongest map, truth. */
  async function decode(image) {
    const maps = await unpacked(image.maps, Uint16Array);
    const size = image.height * image.width;
    image.reached = image.labels.map((_, number) => maps.subarray(number * size, (number + 1) * size));
    image.highest = image.reached[0].map((_, pixel) => Math.max(...image.reached.map((map) => map[pixel])));
    image.strongest = await unpacked(image.strongest, Uint8Array);
    image.known = image.truth && (await unpacked(image.truth, Uint8Array));
  }

  const maskOf = (image) => image.strongest.map((label, pixel) => (image.highest[pixel] >= state.threshold ? label : 0));

  /** IoU in percent of each label in truth or mask; null without a truth. */
  function ious(image) {
    if (!image.known) return null;
    const [both, truth, predicted] = [0, 0, 0].map(() => new Uint32Array(256));
    image.known.forEach((label, pixel) => {
      if (label === IGNORE) return;
      truth[label]++;
      predicted[image.mask[pixel]]++;
      if (label === image.mask[pixel]) both[label]++;
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

  // ---- drawing

  /** Paints labels in their colors, translucent inside, with a light rim; background and ignored pixels stay clear. */
  function paintMask(canvas, image, mask) {
    const table = (color) =>
      Uint32Array.from({ length: 256 }, (_, label) => (label && label !== IGNORE && label in data.labels ? color(label) : 0));
    const inside = table((label) => packed(colorOf(label), 160));
    const rim = table((label) => packed(colorOf(label).map((value) => value + 0.65 * (255 - value)), 255));
    const { width } = image;
    paint(canvas, image, (pixel) => {
      const label = mask[pixel];
      const x = pixel % width;
      const edge =
        (mask[pixel - width] ?? label) !== label ||
        (mask[pixel + width] ?? label) !== label ||
        (x > 0 && mask[pixel - 1] !== label) ||
        (x < width - 1 && mask[pixel + 1] !== label);
      return (edge ? rim : inside)[label];
    });
  }

  function paintMap(canvas, image, number) {
    const bright = brightOf(image.labels[number]);
    paint(canvas, image, (pixel) => packed(bright, Math.round((235 * image.reached[number][pixel]) / data.thresholds.length)));
  }

  function draw() {
    state.settled = true;
    const { image } = state;
    find("at").value = data.thresholds[state.threshold];
    for (const other of data.images) {
      if (!other.highest) continue;
      other.mask = maskOf(other);
      other.ious = ious(other);
      paintMask(other.canvas, other, other.mask);
      other.figure.textContent = other.known ? `mIoU ${inPercent(meanOf(other.ious))}` : "no truth";
    }
    drawCurve();
    if (!image || !image.highest) return;
    const canvas = find("canvas");
    find("stage").classList.toggle("faded", state.view.startsWith("map"));
    if (state.view === "mask") paintMask(canvas, image, image.mask);
    else if (state.view === "truth") paintMask(canvas, image, image.known);
    else paintMap(canvas, image, Number(state.view.slice("map".length)));
    const seen = image.labels.map((label) => `${nameOf(label)} ${shareOf(image.mask, label)} %`).join(", ");
    canvas.setAttribute("aria-label", `${image.id} at threshold ${data.thresholds[state.threshold]}: ${seen}`);
    find("miou").textContent = inPercent(meanOf(image.ious));
    find("labels").replaceChildren(...readings(image));
  }

  const shareOf = (mask, label) => inPercent((100 * mask.filter((value) => value === label).length) / mask.length);

  /** A table row per label: its IoU, and its share of the mask. */
  function readings(image) {
    const rows = image.ious || new Map([0, ...image.labels].map((label) => [label, null]));
    return [...rows].map(([label, iou]) => {
      const row = element("tr");
      const head = element("th");
      head.scope = "row";
      head.append(named(label));
      row.append(head, element("td", "n", inPercent(iou)), element("td", "n", `${shareOf(image.mask, label)} %`));
      row.dataset.label = label;
      return row;
    });
  }

  function shape(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  /** Draws the mIoU of the split over the thresholds, with a dot at the current one. */
  function drawCurve() {
    if (!data.curve) return;
    const { mious } = data.curve;
    const top = Math.max(...mious, 1);
    const x = (number) => 4 + (292 * number) / Math.max(mious.length - 1, 1);
    const y = (miou) => 84 - (76 * miou) / top;
    const line = mious.flatMap((miou, number) => (miou === null ? [] : [`${x(number)},${y(miou)}`])).join(" ");
    const now = mious[state.threshold];
    find("curve").replaceChildren(
      shape("line", { x1: 4, x2: 296, y1: 84, y2: 84, class: "axis" }),
      shape("line", { x1: x(data.start), x2: x(data.start), y1: 4, y2: 84, class: "best" }),
      shape("polyline", { points: line }),
      ...(now === null ? [] : [shape("circle", { cx: x(state.threshold), cy: y(now), r: 4.5 })]),
    );
    find("split").textContent = inPercent(now);
  }

  function redraw() {
    if (!state.settled) return;
    state.settled = false;
    requestAnimationFrame(draw);
  }

  // ---- tooltip

  /** Shows the labels and scores of an image at a position, in fractions of its sides, next to a point of the window. */
  function point(image, across, down, left, top) {
    if (!image?.mask) return; // not decoded yet
    const x = Math.min(Math.max(Math.floor(across * image.width), 0), image.width - 1);
    const y = Math.min(Math.max(Math.floor(down * image.height), 0), image.height - 1);
    const pixel = y * image.width + x;
    const lines = [line("mask", named(image.mask[pixel]))];
    if (image.known) lines.push(line("truth", named(image.known[pixel])));
    image.labels.forEach((label, number) => lines.push(line(named(label), data.thresholds[image.reached[number][pixel]])));
    showTip(lines, left, top).dataset.at = `${x},${y}`;
  }

  // ---- one image and its related images

  function choose(image) {
    state.image = image;
    for (const other of data.images) other.button.setAttribute("aria-pressed", other === image);
    find("id").textContent = image.id;
    find("picture").src = image.picture;
    find("stage").style.setProperty("--ratio", image.width / image.height);
    const whole = image.full[0] === image.height && image.full[1] === image.width;
    const size = `Computed at ${image.width} \u00d7 ${image.height} pixels`;
    find("size").textContent = whole
      ? `${size}, the image's own size, as the scores of the run are.`
      : `${size}; the image has ${image.full[1]} \u00d7 ${image.full[0]}, at which the run is scored.`;
    const views = [["mask", "mask"], ...image.labels.map((label, number) => [`map${number}`, `map of ${nameOf(label)}`])];
    if (image.truth) views.push(["truth", "truth"]);
    state.view = "mask";
    find("views").replaceChildren(...views.map(([value, text]) => view(value, text)));
    find("related").replaceChildren(...related(image));
    redraw();
  }

  function view(value, text) {
    const made = element("label", "chip");
    const radio = element("input");
    Object.assign(radio, { type: "radio", name: "explore-view", value, checked: value === state.view });
    radio.addEventListener("change", () => {
      state.view = value;
      redraw();
    });
    made.append(radio, text);
    return made;
  }

  /** Yields headings and pictures of the related images of each map. */
  function* related(image) {
    if (!image.related.length) yield element("p", "muted", "Its maps are single-round maps, made from this image alone.");
    for (const { label, number: count, tiles } of image.related) {
      const head = element("h3");
      const shown = count === tiles.length ? "" : `, ${tiles.length} shown`;
      const number = count === 1 ? "one related image" : `${count} related images`;
      head.append(named(label), element("span", "", `map made with ${number}${shown}`));
      const strip = element("div", "strip");
      for (const tile of tiles) {
        const figure = element("figure");
        figure.append(picture(tile.picture, `related image ${tile.id}`), element("figcaption", "mono", tile.id));
        strip.append(figure);
      }
      yield head;
      yield strip;
    }
  }

  function thumbnail(image) {
    const item = element("li");
    const button = (image.button = element("button"));
    const layers = element("span", "layers");
    image.canvas = element("canvas");
    image.figure = element("span", "muted");
    button.type = "button";
    layers.style.setProperty("--ratio", image.width / image.height);
    layers.append(picture(image.picture, ""), image.canvas);
    button.append(layers, element("span", "mono", image.id), image.figure);
    button.addEventListener("click", () => choose(image));
    item.append(button);
    return item;
  }

  /** Makes the gallery's pictures show the tooltip, and open the image here on a click. */
  function joinGallery() {
    for (const article of document.querySelectorAll("article[data-explore]")) {
      const image = data.images[article.dataset.explore];
      const button = article.querySelector("button");
      const open = () => {
        choose(image);
        document.getElementById("explore").scrollIntoView();
        image.button.focus({ preventScroll: true });
      };
      button.hidden = false;
      button.addEventListener("click", open);
      article.classList.add("live");
      for (const shown of article.querySelectorAll("img")) {
        watch(shown, (...position) => point(image, ...position), hideTip);
        shown.addEventListener("click", open);
      }
    }
  }

  async function start() {
    document.getElementById("explore").hidden = false;
    document.querySelector('nav a[href="#explore"]').hidden = false;
    find("shelf").append(...data.images.map(thumbnail));
    const slider = find("threshold");
    const move = (number) => {
      slider.value = state.threshold = number;
      slider.setAttribute("aria-valuetext", data.thresholds[number]);
      redraw();
    };
    slider.addEventListener("input", () => move(Number(slider.value)));
    if (data.curve) find("best").addEventListener("click", () => move(data.start));
    move(state.threshold);
    const pointAt = (...position) => point(state.image, ...position);
    watch(find("canvas"), pointAt, hideTip);
    watchKeys(find("canvas"), pointAt, hideTip);
    for (const image of data.images) {
      await decode(image);
      if (!state.image) choose(image);
    }
    state.settled = true;
    draw();
    joinGallery();
    document.getElementById("explore").dataset.ready = "";
  }

  // Older browsers show the page as if it had no script.
  if ("DecompressionStream" in window) start();
})();
