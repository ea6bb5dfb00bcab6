// The page of a run: a list that holds only the steps in sight, the map of all of them, the chosen step, the live tail.

const { $, $$, fetchPage, keys } = await import($module("inspector.js"));  // the same URL as in the page: one module
const ROW = 29, SVG = "http://www.w3.org/2000/svg", ICONS = ["failed", "in_doubt", "retrying", "waiting"];

function $module(name) { return document.querySelector(`script[src*="/${name}"]`).src; }

const api = (box, query) => fetch(`${box.dataset.source}${box.dataset.source.includes("?") ? "&" : "?"}${query}`).then(answer => answer.json());

function at(changes) {  // the URL of this page with some of its query changed; null removes
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) value === null ? url.searchParams.delete(name) : url.searchParams.set(name, value);
  return url;
}

function make(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// --- all steps in time, for the map and for the bars of a long list

class Outline {
  constructor(data) {
    const room = 1000 - 40 * data.gaps.length, real = data.duration - data.gaps.reduce((sum, [a, b]) => sum + b - a, 0);
    let now = 0;
    Object.assign(this, { data, total: data.steps.length, scale: room / Math.max(real, 1e-6) });
    this.from = data.starts.map(gap => this.place(now += gap / 1e6));
    now = 0;
    this.to = data.lasts.map((took, n) => { now += data.starts[n] / 1e6; return this.place(took < 0 ? data.duration : now + took / 1e6); });
  }

  place(moment) {  // from 0 to 1000; a pause in which nothing ran is short
    let x = moment * this.scale;
    for (const [a, b] of this.data.gaps) {
      if (moment <= a) break;
      const inside = Math.min(moment, b) - a;
      x += (40 * inside) / (b - a) - inside * this.scale;
    }
    return x;
  }
}

// --- the list

class Steps {
  constructor(box) {
    Object.assign(this, { box, rows: $("#rows", box), total: Number(box.dataset.total), size: Number(box.dataset.window), pages: new Map() });
    this.template = $(".row", this.rows);
    this.sprite = $("use", this.template).getAttribute("href").split("#")[0];
    $(".pager", box)?.remove();
    this.makePool(Number(box.dataset.from), [...this.rows.children]);
    box.addEventListener("scroll", () => { this.due ??= requestAnimationFrame(() => { this.due = null; this.draw(); }); }, { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  get first() { return Math.max(0, Math.floor(this.box.scrollTop / ROW) - 8); }

  get shown() { return Math.ceil(this.box.clientHeight / ROW) + 16; }

  get needed() {
    const last = Math.min(this.total, this.first + this.shown) - 1;
    return [...new Set([this.first, Math.max(last, 0)].map(n => Math.floor(n / this.size)))];
  }

  makePool(from, old) {  // a row is used again for another step: the page has as many as there is room for
    this.pool = [];
    this.rows.classList.add("placed");
    this.rows.style.height = `${this.total * ROW}px`;
    for (const row of old) row.style.transform = `translateY(${(row.dataset.n - 1) * ROW}px)`;
    this.old = old;
    this.box.scrollTop = from * ROW;
  }

  async page(number) {
    if (!this.pages.has(number) && this.pages.size) await new Promise(done => setTimeout(done, 120));
    if (!this.pages.has(number)) {
      if (!this.needed.includes(number)) return null;  // scrolled past it: not worth a request
      this.pages.set(number, api(this.box, `part=steps&from=${number * this.size}`).then(answer => answer.rows));
    }
    return this.pages.get(number);
  }

  async draw() {
    const first = this.first, last = Math.min(this.total, first + this.shown), mark = this.mark = Symbol();
    const pages = new Map(await Promise.all(this.needed.map(async number => [number, await this.page(number)])));
    if (mark !== this.mark) return;  // scrolled on meanwhile
    while (this.pool.length < this.shown) this.pool.push(this.rows.appendChild(Object.assign(this.template.cloneNode(true), { hidden: true })));
    for (let n = first; n < last; n++) {
      const step = pages.get(Math.floor(n / this.size))?.[n % this.size], row = this.pool[n % this.pool.length];
      if (step && row.step !== step) this.fill(row, step);
    }
    for (const row of this.old) row.remove();
    this.old = [];
    this.zooming ??= setTimeout(() => { this.zooming = null; this.zoomIn(); }, this.zoom ? 90 : 0);
  }

  fill(row, step) {
    const key = step.status.replace(" ", "_"), icon = `${this.sprite}#${ICONS.includes(key) ? key : step.kind}`, use = $("use", row);
    row.step = step;
    row.hidden = false;
    row.className = `row k-${step.kind} s-${key}`;
    row.href = at({ step: step.number });
    row.dataset.n = step.number;
    row.ariaCurrent = step.number === chosen() ? "true" : null;
    row.style.transform = `translateY(${(step.number - 1) * ROW}px)`;
    if (use.getAttribute("href") !== icon) use.setAttribute("href", icon);
    $(".icon", row).setAttribute("aria-label", `${step.kind}, ${step.status}`);
    $(".path", row).textContent = step.path;
    $(".name", row).textContent = step.name;
    if (step.attempts > 1) $(".name", row).append(Object.assign(document.createElement("i"), { textContent: `×${step.attempts}` }));
    $(".num", row).textContent = step.took;
    $(".text", row).textContent = step.text;
    if (this.zoom) this.place(row);
  }

  place(row) {
    const n = row.step.number - 1, left = this.zoom(outline.from[n] ?? 1000), rect = $("rect", row);
    rect.setAttribute("x", `${Math.min(left, 99.2)}%`);
    rect.setAttribute("width", `${Math.max(this.zoom(outline.to[n] ?? 1000) - left, 0.8)}%`);
  }

  zoomIn() {  // the map shows all of the run, the rows what is in sight
    const top = Math.floor(this.box.scrollTop / ROW), end = Math.min(top + Math.ceil(this.box.clientHeight / ROW), outline?.total ?? 0);
    if (!outline || top >= end) return;
    const from = outline.from[top], to = Math.max(...outline.to.slice(top, end), from + 0.001);
    this.zoom = x => ((x - from) / (to - from)) * 100;
    for (const row of this.pool) if (row.step) this.place(row);
    $("#axis").replaceChildren(...outline.data.gaps.flatMap(([start, , text]) => {
      const a = this.zoom(outline.place(start)), b = this.zoom(outline.place(start) + 40);
      if (b < 0 || a > 100) return [];
      const middle = Math.min(Math.max((a + b) / 2, 1), 99);
      return [make("rect", { class: "pause", x: `${a}%`, width: `${b - a}%`, height: 20 }), make("text", { class: middle > 80 ? "end" : middle < 20 ? "start" : "", x: `${middle}%`, y: 14 }, b - a > 8 ? text : "")];
    }));
  }

  show(n) {
    const top = (n - 1) * ROW, { box } = this;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top > box.scrollTop + box.clientHeight - 2 * ROW - 4) box.scrollTop = top - box.clientHeight + 2 * ROW + 4;
  }

  grow(total) {
    for (const number of [...this.pages.keys()]) if ((number + 1) * this.size > this.total) this.pages.delete(number);
    const follows = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 3 * ROW && total > this.total;
    this.total = total;
    this.rows.style.height = `${total * ROW}px`;
    this.draw().then(() => { if (follows) this.box.scrollTop = this.box.scrollHeight; });
  }
}

// --- the map: time from left to right, the order of the steps from top to bottom

function drawMap() {
  const map = $("#minimap"), box = $("#steps");
  if (!map || !outline) return;
  const ratio = devicePixelRatio || 1, width = Math.round(map.clientWidth * ratio), height = Math.round(map.clientHeight * ratio);
  const drawn = `${width} ${height} ${outline.total} ${getComputedStyle(map).backgroundColor}`;
  if (drawn !== map.drawn) Object.assign(map, { width, height, drawn, picture: paint(map, width, height, ratio) });
  const pen = map.getContext("2d"), share = height / (outline.total * ROW), top = box.scrollTop * share;
  const tall = Math.max(box.clientHeight * share, 4);
  pen.clearRect(0, 0, width, height);
  pen.drawImage(map.picture, 0, 0);
  pen.strokeStyle = getComputedStyle(map).color;
  pen.strokeRect(0.5, top + 0.5, width - 1, tall - 1);
}

function paint(map, width, height, ratio) {
  const picture = new OffscreenCanvas(Math.max(width, 1), Math.max(height, 1)), pen = picture.getContext("2d"), tall = Math.max(height / outline.total, 1.5 * ratio);
  const probe = map.parentElement.appendChild(document.createElement("i"));
  const colours = outline.data.colours.map(name => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; });
  probe.remove();
  outline.data.steps.forEach((colour, n) => {
    pen.fillStyle = colours[colour];
    pen.fillRect((outline.from[n] / 1000) * width, (n / outline.total) * (height - tall), Math.max(((outline.to[n] - outline.from[n]) / 1000) * width, 1.5 * ratio), tall);
  });
  return picture;
}

// --- the page: what is chosen is in the URL

let steps = null, outline = null, isReading = false, readAt = 0;
const chosen = () => Number(new URL(location.href).searchParams.get("step")) || 0;

function bind() {
  const box = $("#steps");
  if (!box || box.bound) return;
  box.bound = true;
  if (Number(box.dataset.total) > $$(".row", box).length) steps = new Steps(box);
  box.addEventListener("scroll", drawMap, { passive: true });
  if (steps && chosen()) box.scrollTop = (chosen() - 0.5) * ROW - box.clientHeight / 2;
  else $("[aria-current]", $("#rows"))?.scrollIntoView({ block: "nearest" });
}

async function readOutline() {  // all of a long run is much to read: seldom while it runs
  if (!$("#minimap") || isReading || Date.now() - readAt < 2000) return;
  isReading = true;
  try { outline = new Outline(await api($("#steps"), "part=outline")); } finally { isReading = false; readAt = Date.now(); }
  drawMap();
  steps?.zoomIn();
}

async function choose(n, url = n ? at({ step: n, find: null }) : at({ step: null })) {
  history.replaceState(null, "", url);
  if (n) steps?.show(n);
  for (const row of $$("#rows .row")) row.ariaCurrent = Number(row.dataset.n) === n ? "true" : null;
  if (!steps && n) $(`.row[data-n="${n}"]`)?.scrollIntoView({ block: "nearest" });
  if (choose.isReading) return;
  choose.isReading = true;
  try {
    for (let done = -1; done !== chosen();) {
      done = chosen();
      const { page } = await fetchPage(location.href), fresh = page.getElementById("detail");
      if (fresh && done === chosen()) $("#detail").replaceWith(document.adoptNode(fresh));
    }
  } finally { choose.isReading = false; }
}

const total = () => Number($("#steps").dataset.total);
const move = by => choose(Math.min(Math.max(chosen() + by, 1), total()));
Object.assign(keys, { j: () => move(1), k: () => move(-1), Escape: () => chosen() && choose(0) });

document.addEventListener("click", event => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  const row = event.target.closest("#rows .row"), close = event.target.closest("[data-close]");
  if (row || close) { event.preventDefault(); choose(row ? Number(row.dataset.n) : 0); }
  if (event.target.id === "minimap") {
    const box = $("#steps");
    box.scrollTop = (event.offsetY / event.target.clientHeight) * total() * ROW - box.clientHeight / 2;
  }
});

$("#find")?.addEventListener("submit", async event => {
  event.preventDefault();
  const text = $("[name=find]", event.target).value, { hits } = await api($("#steps"), `part=find&find=${encodeURIComponent(text)}`);
  const hit = hits.find(one => one.number > chosen()) ?? hits[0];
  $("[name=find]", event.target).ariaInvalid = text && !hit ? "true" : null;
  if (hit) choose(hit.number);
});

document.addEventListener("refreshed", event => {
  const fresh = event.detail.getElementById("steps");
  if (!fresh) return;
  bind();
  $("#steps").dataset.total = fresh.dataset.total;
  steps?.grow(total());
  readOutline();
  listen(event.detail.getElementById("tail")?.dataset.status);
});
document.addEventListener("themed", drawMap);

// --- the live tail: what the steps that run now emit

let source = null;
function listen(status) {
  const tail = $("#tail");
  if (source && status !== "running") { source.close(); source = null; tail?.replaceChildren(); }
  if (tail) tail.hidden = !tail.children.length;
  if (source || !tail || status !== "running") return;
  source = new EventSource(tail.dataset.source);
  const talk = ({ path, name }, isNew) => {
    const old = $$(".talk", tail).find(one => one.dataset.path === path);
    if (old || !isNew) return old;
    const title = Object.assign(document.createElement("h3"), { textContent: `${path} ${name.replace(/^perdure\./, "")} says` });
    const made = tail.appendChild(Object.assign(document.createElement("div"), { className: "talk" }));
    made.dataset.path = path;
    made.append(title, document.createElement("pre"));
    return made;
  };
  const on = (kinds, act) => kinds.forEach(kind => source.addEventListener(kind, event => { act(JSON.parse(event.data)); tail.hidden = !tail.children.length; }));
  on(["chunk"], said => {
    const text = $("pre", talk(said, true)), isAtEnd = text.scrollTop + text.clientHeight > text.scrollHeight - 24;
    text.textContent = (text.textContent + said.text).slice(-20_000);
    if (isAtEnd) text.scrollTop = text.scrollHeight;
  });
  on(["reset"], said => { const old = talk(said); if (old) $("pre", old).textContent = ""; });
  on(["lost"], said => { $("pre", talk(said, true)).textContent += ` … ${said.text} missing … `; });
  on(["done", "failed", "change"], said => talk(said)?.remove());
  on(["status"], () => listen("over"));
}

bind();
readOutline();
new ResizeObserver(drawMap).observe($("#minimap") ?? document.body);
listen($("#tail")?.dataset.status);
document.body.dataset.steps = "ready";
