// What pages do beyond links and forms: live parts, confirmations as dialogs, keys, copying, times. Text of the store
// reaches a page as HTML that the server has escaped and DOMParser has read, or through textContent.

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
const root = document.documentElement.dataset.root;

export async function fetchPage(url, options = {}) {
  const answer = await fetch(url, { ...options, headers: { "X-Part": "live", ...options.headers } });
  return { answer, page: new DOMParser().parseFromString(await answer.text(), "text/html") };
}

// --- live: at a change the parts marked data-live are read again, except where a person has input

let isReading = false, isStale = false, isHeldBack = false;

function hasInput(part) {
  const fields = $$("input:not([type=hidden]), select, textarea", part);
  return part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea")
    || fields.some(field => field.type === "checkbox" || field.type === "radio" ? field.checked !== field.defaultChecked
      : field.tagName === "SELECT" ? [...field.options].some(one => one.selected !== one.defaultSelected) && field.dataset.touched
      : field.value !== field.defaultValue)
    || $("details[data-touched]", part) !== null;
}

function replaceParts(page) {
  isHeldBack = false;
  for (const part of $$("[data-live]")) {
    const fresh = page.getElementById(part.id);
    if (!fresh || fresh.isEqualNode(part)) continue;
    if (hasInput(part)) { isHeldBack = true; continue; }
    const row = part.contains(document.activeElement) ? document.activeElement.id : "";
    part.replaceWith(document.adoptNode(fresh));
    if (row) document.getElementById(row)?.focus();
  }
}

async function refresh() {
  if (isReading || document.hidden) { isStale = true; return; }
  isReading = true;
  isStale = false;
  try {
    const { answer, page } = await fetchPage(location.href);
    if (answer.ok || answer.status === 404) replaceParts(page);
    document.dispatchEvent(new CustomEvent("refreshed", { detail: page }));
  } catch { isStale = true; } finally {
    setTimeout(() => { isReading = false; if (isStale) refresh(); }, 200);
  }
}

const live = $("#live");
if (live) {
  const say = (state, text) => { live.className = `live ${state}`; $("span", live).textContent = text; };
  const events = new EventSource(`${root}/events`);
  let wasAway = false;
  events.addEventListener("hello", () => { say("on", "live"); if (wasAway) refresh(); wasAway = false; });
  events.addEventListener("change", refresh);
  events.onerror = () => { wasAway = true; say("off", "no connection"); };
  document.addEventListener("visibilitychange", () => { if (!document.hidden && isStale) refresh(); });
  document.addEventListener("focusout", () => { if (isHeldBack) refresh(); });
  addEventListener("pagehide", () => events.close());
  addEventListener("pageshow", event => { if (event.persisted) location.reload(); });
}

// --- confirmations: the page that asks first, as a dialog

document.addEventListener("submit", async event => {
  const form = event.target;
  if (!form.matches("[data-asks]")) return;
  event.preventDefault();
  const body = new URLSearchParams(new FormData(form, event.submitter));
  const { answer, page } = await fetchPage(form.action, { method: "POST", body });
  const asked = page.getElementById("confirm");
  if (!asked) { if (answer.redirected) location.href = answer.url; else location.reload(); return; }
  const dialog = $("#asked");
  dialog.replaceChildren(document.adoptNode(asked));
  dialog.showModal();
  $("button.primary", dialog).focus();
});

// --- clicks

document.addEventListener("click", async event => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    await navigator.clipboard?.writeText(copy.dataset.copy);
    copy.classList.add("did");
    setTimeout(() => copy.classList.remove("did"), 900);
  }
  const opener = event.target.closest("[data-opens]");
  if (opener) document.getElementById(opener.dataset.opens).showModal();
  const closer = event.target.closest("dialog [data-back]");
  if (closer) { event.preventDefault(); closer.closest("dialog").close(); }
  if (event.target.closest("[data-theme-toggle]")) {
    const page = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = page.dataset.theme === "auto" ? (dark ? "dark" : "light") : page.dataset.theme;
    page.dataset.theme = now === "dark" ? "light" : "dark";
    document.cookie = `theme=${page.dataset.theme}; path=${root || "/"}; max-age=31536000; samesite=strict`;
  }
  const summary = event.target.closest("summary");
  if (summary) summary.parentElement.dataset.touched = "";
});

document.addEventListener("change", event => {
  event.target.dataset.touched = "";
  if (event.target.matches("[data-goes]")) event.target.form.submit();
});

// --- keys. A page adds its own: keys.ArrowLeft = () => …

export const keys = {
  "?": () => $("#keys").showModal(),
  "/": () => $("[data-search]")?.focus(),
  g: () => { going = Date.now(); },
  j: () => moveRow(1),
  k: () => moveRow(-1),
};
let going = 0;

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  if (Date.now() - going < 1200) {
    going = 0;
    const link = $(`[data-go="${CSS.escape(event.key)}"]`);
    if (link) { link.click(); return; }
  }
  if (event.key === "Enter" && event.target.matches("[data-row]")) $("[data-open]", event.target)?.click();
  const act = keys[event.key];
  if (act) { event.preventDefault(); act(); }
});

function moveRow(by) {
  const rows = $$("[data-row]"), at = rows.indexOf(document.activeElement);
  rows[Math.min(Math.max(at + by, 0), rows.length - 1)]?.focus();
}

// --- times, and the notice that was read

setInterval(() => {
  const units = [[60, "s", 1], [3600, "min", 60], [86400, "h", 3600], [2592000, "d", 86400]];
  for (const time of $$("time")) {
    const past = (Date.now() - new Date(time.dateTime)) / 1000, unit = units.find(([most]) => Math.abs(past) < most);
    if (!unit) continue;
    const text = `${Math.floor(Math.abs(past) / unit[2])} ${unit[1]}`;
    time.textContent = past < -1 ? `in ${text}` : past < 3 ? "just now" : `${text} ago`;
  }
}, 10_000);

const url = new URL(location.href);
if (url.searchParams.has("notice")) {  // a link to this page must not say again what was done
  url.searchParams.delete("notice");
  history.replaceState(null, "", url);
}
