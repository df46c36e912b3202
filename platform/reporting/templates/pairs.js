// Maps, attention and gates of a run's page: what each position of an image finds in the related images of a map.
//
// Fills the section #pairs, which is hidden without a script; pairs.py writes the data. Maps and gates are given at
// `points` x `points` points that cover the image; attention is given from some positions of the image to cells of each
// related image, in 255ths of the largest share of the position.
(() => {
  const find = (name) => document.getElementById(`pairs-${name}`);
  const images = data.images.filter((image) => image.attention);
  const state = { image: null, map: null, pair: null, pinned: null, at: null };
  const GATE = [255, 205, 80];

  // ---- numbers

  async function decode(attention) {
    if (attention.ready) return;
    for (const map of attention.maps) {
      for (const kind of map.kinds) kind.values = await unpacked(kind.points, Uint8Array);
      for (const pair of map.pairs) {
        pair.values = await unpacked(pair.shares, Uint8Array);
        pair.scale = await unpacked(pair.largest, Float32Array);
        pair.gateValues = [];
        for (const gate of pair.gates) pair.gateValues.push(await unpacked(gate, Uint8Array));
      }
    }
    attention.ready = true;
  }

  const clipped = (value, count) => Math.min(Math.max(value, 0), count - 1);
  const nearest = (side, fraction) => clipped(Math.round((fraction - side.first) / side.step), side.positions);
  const locationOf = (side, position) => side.first + side.step * position;

  /** Value in [0, 1] of a map or gate at a location in fractions of the sides. */
  function valueAt(values, across, down) {
    const { points } = state.image.attention;
    const x = clipped(Math.floor(across * points), points);
    const y = clipped(Math.floor(down * points), points);
    return values[y * points + x] / 255;
  }

  /** Row of the attention of a pair at the current position: its shares in 255ths, and the largest share. */
  function rowOf(pair) {
    const count = pair.cells.rows.positions * pair.cells.columns.positions;
    const row = state.at[0] * pair.targets.columns.positions + state.at[1];
    return { shares: pair.values.subarray(row * count, (row + 1) * count), largest: pair.scale[row] };
  }

  /** The position that is nearest to the strongest point of the map with related images. */
  function strongest() {
    const { points } = state.image.attention;
    const { values } = state.map.kinds[1];
    const best = values.indexOf(Math.max(...values));
    return positionAt(((best % points) + 0.5) / points, (Math.floor(best / points) + 0.5) / points);
  }

  function positionAt(across, down) {
    const { rows, columns } = state.pair.targets;
    return [nearest(rows, down), nearest(columns, across)];
  }

  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const percent = (share) => `${(100 * share).toPrecision(3)} %`;

  // ---- drawing

  /** A picture with a canvas above it and a caption. */
  function layered(source, text, ratio, title, note = "") {
    const figure = element("figure");
    const layers = element("div", "layers dim");
    layers.style.setProperty("--ratio", ratio);
    const canvas = element("canvas", "smooth");
    layers.append(picture(source, text), canvas);
    const caption = element("figcaption");
    caption.append(element("b", "", title), element("span", "", note));
    figure.append(layers, caption);
    return { figure, layers, canvas, note: caption.lastChild };
  }

  const ratioOf = (image) => image.width / image.height;

  function paintValues(canvas, values, [width, height], color, strength) {
    paint(canvas, { width, height }, (point) => packed(color, Math.round(235 * strength(values[point] / 255))));
  }

  /** Places a canvas of cells so that the center of each cell is at its location in the picture. */
  function place(canvas, { rows, columns }) {
    const put = (side, start, size) => {
      canvas.style[start] = `${100 * (side.first - side.step / 2)}%`;
      canvas.style[size] = `${100 * side.step * side.positions}%`;
    };
    put(rows, "top", "height");
    put(columns, "left", "width");
  }

  function drawMaps() {
    const { image, map } = state;
    const { points } = image.attention;
    const whole = layered(image.picture, image.id, ratioOf(image), "image", "the marked position");
    whole.layers.classList.remove("dim");
    const shown = [whole];
    for (const kind of map.kinds) {
      const cell = layered(image.picture, `${kind.name} map of ${image.id}`, ratioOf(image), kind.name, noteOf(kind));
      paintValues(cell.canvas, kind.values, [points, points], brightOf(map.label), (value) => value);
      shown.push(cell);
    }
    for (const cell of shown) addMarker(cell);
    find("maps").replaceChildren(...shown.map((cell) => cell.figure));
    if (map.kinds.length < 3) find("maps").append(missing());
  }

  function noteOf(kind) {
    const { pairs, related, contrasted } = state.map;
    if (kind.name === "single round") return "from this image alone";
    if (kind.name === "contrastive") return `against ${counted(contrasted, "related image")} of its other tags`;
    const below = pairs.length < related ? `, ${pairs.length} of them below` : "";
    return `of the run, with ${counted(related, "related image")}${below}`;
  }

  function missing() {
    const figure = element("figure");
    const { can_contrast: canContrast, maps } = state.image.attention;
    let reason = "needs related images of other tags that lack this class";
    if (maps.length === 1) reason = "needs a second tag";
    if (!canContrast) reason = "the classifier has no contrastive co-attention, or the related images lack the class";
    const caption = element("figcaption");
    caption.append(element("b", "", "contrastive"), element("span", "", reason));
    figure.append(element("div", "blank", "none"), caption);
    return figure;
  }

  /** Adds the marker to a picture of the image, which then follows the pointer; a click keeps the position. */
  function addMarker({ layers }) {
    layers.append(element("i", "marker"));
    layers.classList.add("pointed");
    layers.tabIndex = 0;
    const point = (across, down, left, top) => {
      move(positionAt(across, down));
      showTip(linesAt(across, down), left, top);
    };
    const leave = () => {
      hideTip();
      move(state.pinned || strongest());
    };
    watch(layers, point, leave);
    watchKeys(layers, point, leave);
    layers.addEventListener("click", (event) => {
      const box = layers.getBoundingClientRect();
      const at = positionAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
      state.pinned = String(state.pinned) === String(at) ? null : at; // a second click releases it
      state.at = at;
      drawPosition();
    });
  }

  /** Lines of the tooltip over a picture of the image: values of its maps and of the gate of the chosen pair. */
  function linesAt(across, down) {
    const lines = state.map.kinds.map((kind) => line(kind.name, valueAt(kind.values, across, down).toFixed(2)));
    if (state.pair.gates.length) lines.push(line("gate B", valueAt(state.pair.gateValues[0], across, down).toFixed(2)));
    return lines;
  }

  function drawPairs() {
    const cells = state.map.pairs.map((pair) => {
      const cell = layered(pair.picture, `attention in ${pair.id}`, ratioOf(pair), pair.id);
      place(cell.canvas, pair.cells);
      cell.figure.classList.add("pair");
      if (pair.gates.length) cell.figure.append(chooser(pair));
      watch(cell.layers, (across, down, left, top) => showTip([shareLine(pair, across, down)], left, top), hideTip);
      pair.cell = cell;
      return cell.figure;
    });
    find("related").replaceChildren(...cells);
  }

  function shareLine(pair, across, down) {
    const { shares, largest } = rowOf(pair);
    const cell = nearest(pair.cells.rows, down) * pair.cells.columns.positions + nearest(pair.cells.columns, across);
    return line("attention of the position", percent((shares[cell] / 255) * largest));
  }

  function chooser(pair) {
    const button = element("button", "", "gate of this pair");
    button.type = "button";
    button.addEventListener("click", () => {
      state.pair = pair;
      drawGates();
    });
    pair.button = button;
    return button;
  }

  function move(position) {
    if (String(position) === String(state.at)) return;
    state.at = position;
    drawPosition();
  }

  /** Marks the position, and draws where it attends in each related image. */
  function drawPosition() {
    const { rows, columns } = state.pair.targets;
    for (const marker of document.querySelectorAll("#pairs .marker")) {
      marker.style.left = `${100 * locationOf(columns, state.at[1])}%`;
      marker.style.top = `${100 * locationOf(rows, state.at[0])}%`;
      marker.classList.toggle("pinned", state.pinned !== null);
    }
    find("maps").dataset.at = state.at;
    for (const pair of state.map.pairs) {
      const { shares, largest } = rowOf(pair);
      const size = [pair.cells.columns.positions, pair.cells.rows.positions];
      paintValues(pair.cell.canvas, shares, size, brightOf(state.map.label), (value) => value ** 0.7);
      const even = 1 / (size[0] * size[1]);
      pair.cell.note.textContent = `brightest cell ${percent(largest)} of the attention, ${(largest / even).toPrecision(2)} times an even share`;
    }
  }

  function drawGates() {
    const { image, pair } = state;
    const section = find("gates");
    section.hidden = !pair.gates.length;
    if (section.hidden) return;
    for (const other of state.map.pairs) other.button.setAttribute("aria-pressed", other === pair);
    const { points } = image.attention;
    const cells = [];
    [image, pair].forEach((shown, number) => {
      const values = pair.gateValues[number];
      const [low, high] = [Math.min(...values) / 255, Math.max(...values) / 255];
      const stretched = (value) => (value - low) / Math.max(high - low, 1e-6);
      const kinds = [
        ["B", "shared", (value) => value, stretched],
        ["1 \u2212 B", "unshared", (value) => 1 - value, (value) => 1 - stretched(value)],
      ];
      for (const [symbol, meaning, meant, strength] of kinds) {
        const title = `${symbol} of ${number ? "the related image" : "the image"}`;
        const range = [meant(low), meant(high)].sort().map((value) => value.toFixed(2));
        const note = `${meaning}; from ${range[0]} (dark) to ${range[1]}`;
        const cell = layered(shown.picture, `${title}: ${shown.id}`, ratioOf(shown), title, note);
        paintValues(cell.canvas, values, [points, points], GATE, strength);
        const value = (across, down) => meant(valueAt(values, across, down)).toFixed(2);
        watch(cell.layers, (across, down, left, top) => showTip([line(symbol, value(across, down))], left, top), hideTip);
        cells.push(cell.figure);
      }
    });
    find("pair").textContent = pair.id;
    find("tags").replaceChildren(...pair.labels.map(named));
    find("gate").replaceChildren(...cells);
  }

  // ---- choices

  function chooseMap(map) {
    hideTip();
    state.map = map;
    [state.pair] = map.pairs;
    state.pinned = null;
    drawMaps();
    drawPairs();
    state.at = strongest();
    drawPosition();
    drawGates();
  }

  async function choose(image) {
    await decode(image.attention);
    state.image = image;
    for (const other of images) other.pairsButton.setAttribute("aria-pressed", other === image);
    find("views").replaceChildren(...image.attention.maps.map(choice));
    chooseMap(image.attention.maps[0]);
  }

  function choice(map, number) {
    const made = element("label", "chip");
    const radio = element("input");
    Object.assign(radio, { type: "radio", name: "pairs-view", value: map.label, checked: number === 0 });
    radio.addEventListener("change", () => chooseMap(map));
    made.append(radio, named(map.label));
    return made;
  }

  function thumbnail(image) {
    const item = element("li");
    const button = (image.pairsButton = element("button"));
    const layers = element("span", "layers");
    button.type = "button";
    layers.style.setProperty("--ratio", ratioOf(image));
    layers.append(picture(image.picture, ""));
    button.append(layers, element("span", "mono", image.id));
    button.addEventListener("click", () => choose(image));
    item.append(button);
    return item;
  }

  async function start() {
    document.getElementById("pairs").hidden = false;
    document.querySelector('nav a[href="#pairs"]').hidden = false;
    find("shelf").append(...images.map(thumbnail));
    await choose(images[0]);
    document.getElementById("pairs").dataset.ready = "";
  }

  if ("DecompressionStream" in window && images.length) start();
})();
