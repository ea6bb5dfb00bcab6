// The page of a run: a list that holds only the steps in sight, the map of all of them, the chosen step, the live tail.

const { $, $$, fetchPage, keys } = await import($module("inspector.js"));  // the same URL as in the page: one module
const ROW = 29, ICONS = ["failed", "in_doubt", "retrying", "waiting"];

function $module(name) { return document.querySelector(`script[src*="/${name}"]`).src; }

const api = (box, query) => fetch(`${box.dataset.source}${box.dataset.source.includes("?") ? "&" : "?"}${query}`).then(answer => answer.json());

function at(changes) {  // the URL of this page with some of its query changed; null removes
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) value === null ? url.searchParams.delete(name) : url.searchParams.set(name, value);
  return url;
}

// --- the list of a long run: a row is used again for another step, so the page has as many as there is room for

class Steps {
  constructor(box) {
    Object.assign(this, { box, rows: $("#rows", box), size: Number(box.dataset.window), pages: new Map(), pool: [] });
    this.template = $(".row", this.rows);
    this.sprite = $("use", this.template).getAttribute("href").split("#")[0];
    $(".pager", box)?.remove();
    this.rows.classList.add("placed");
    this.rows.style.height = `${total() * ROW}px`;
    this.old = [...this.rows.children];
    for (const row of this.old) row.style.transform = `translateY(${(row.dataset.n - 1) * ROW}px)`;
    box.scrollTop = Number(box.dataset.from) * ROW;
    box.addEventListener("scroll", () => { this.due ??= requestAnimationFrame(() => { this.due = null; this.draw(); }); }, { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  get first() { return Math.max(0, Math.floor(this.box.scrollTop / ROW) - 8); }

  get shown() { return Math.ceil(this.box.clientHeight / ROW) + 16; }

  get needed() {
    const last = Math.min(total(), this.first + this.shown) - 1;
    return [...new Set([this.first, Math.max(last, 0)].map(n => Math.floor(n / this.size)))];
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
    const first = this.first, last = Math.min(total(), first + this.shown), mark = this.mark = Symbol();
    const pages = new Map(await Promise.all(this.needed.map(async number => [number, await this.page(number)])));
    if (mark !== this.mark) return;  // scrolled on meanwhile
    while (this.pool.length < this.shown) this.pool.push(this.rows.appendChild(Object.assign(this.template.cloneNode(true), { hidden: true })));
    for (let n = first; n < last; n++) {
      const step = pages.get(Math.floor(n / this.size))?.[n % this.size], row = this.pool[n % this.pool.length];
      if (step && row.step !== step) this.fill(row, step);
    }
    for (const row of this.old) row.remove();
    this.old = [];
  }

  fill(row, step) {
    const key = step.status.replace(" ", "_"), icon = `${this.sprite}#${ICONS.includes(key) ? key : step.kind}`;
    const use = $("use", row), bar = $("rect", row);
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
    bar.setAttribute("x", `${step.x}%`);
    bar.setAttribute("width", `${step.width}%`);
    $(".num", row).textContent = step.took;
    $(".text", row).textContent = step.text;
  }

  show(n) {
    const top = (n - 1) * ROW, { box } = this;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top > box.scrollTop + box.clientHeight - 2 * ROW - 4) box.scrollTop = top - box.clientHeight + 2 * ROW + 4;
  }

  grow(before) {
    for (const number of [...this.pages.keys()]) if ((number + 1) * this.size > before) this.pages.delete(number);
    const follows = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 3 * ROW && total() > before;
    this.rows.style.height = `${total() * ROW}px`;
    this.draw().then(() => { if (follows) this.box.scrollTop = this.box.scrollHeight; });
  }
}

// --- the page: what is chosen is in the URL

let steps = null;
const chosen = () => Number(new URL(location.href).searchParams.get("step")) || 0;
const total = () => Number($("#steps").dataset.total);

function showSight() {  // on the map: the part of the list that is in sight
  const sight = $("#sight"), box = $("#steps"), rows = $("#minimap")?.viewBox.baseVal.height / box.scrollHeight;
  if (!sight) return;
  sight.setAttribute("y", box.scrollTop * rows);
  sight.setAttribute("height", box.clientHeight * rows);
}

function bind() {
  const box = $("#steps");
  showSight();
  if (!box || box.bound) return;
  box.bound = true;
  if (total() > $$(".row", box).length) steps = new Steps(box);
  box.addEventListener("scroll", showSight, { passive: true });
  if (steps && chosen()) box.scrollTop = (chosen() - 0.5) * ROW - box.clientHeight / 2;
  else $("[aria-current]", $("#rows"))?.scrollIntoView({ block: "nearest" });
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
      const { page } = await fetchPage(location.href, { headers: { "X-Part": "detail" } }), fresh = page.getElementById("detail");
      if (fresh && done === chosen()) $("#detail").replaceWith(document.adoptNode(fresh));
    }
  } finally { choose.isReading = false; }
}

const move = by => choose(Math.min(Math.max(chosen() + by, 1), total()));
Object.assign(keys, { j: () => move(1), k: () => move(-1), Escape: () => chosen() && choose(0) });

document.addEventListener("click", event => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  const row = event.target.closest("#rows .row"), close = event.target.closest("[data-close]"), map = event.target.closest("#minimap");
  if (row || close) { event.preventDefault(); choose(row ? Number(row.dataset.n) : 0); }
  if (map) {
    const box = $("#steps"), { top, height } = map.getBoundingClientRect();
    box.scrollTop = ((event.clientY - top) / height) * box.scrollHeight - box.clientHeight / 2;
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
  const fresh = event.detail.getElementById("steps"), before = total();
  if (!fresh) return;
  $("#steps").dataset.total = fresh.dataset.total;
  bind();
  steps?.grow(before);
  listen(event.detail.getElementById("tail")?.dataset.status);
});

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
listen($("#tail")?.dataset.status);
document.body.dataset.steps = "ready";
