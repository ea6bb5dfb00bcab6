// The scrubber of a thread: a move reads the checkpoint alone, and never more than one at a time.

const $ = selector => document.querySelector(selector);
const parts = ["at", "checkpoint"];
let wanted = null, isReading = false;

async function go(step) {
  wanted = step;
  $("[data-scrubber]").value = step;
  if (isReading) return;
  isReading = true;
  try {
    for (let done = null; done !== wanted;) {
      done = wanted;
      const url = new URL(location.href);
      url.searchParams.set("at", done);
      for (const name of ["cp", "edit"]) url.searchParams.delete(name);
      const answer = await fetch(url, { headers: { "X-Part": "checkpoint" } });
      if (!answer.ok) { location.href = url; return; }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const held = document.activeElement?.closest("#at a")?.getAttribute("aria-label");
      for (const id of parts) document.getElementById(id).replaceWith(document.adoptNode(page.getElementById(id)));
      if (held) $(`#at a[aria-label="${CSS.escape(held)}"]`)?.focus();
      history.replaceState(null, "", url);
      mark();
    }
  } finally { isReading = false; }
}

function mark() {
  const { step, base } = $("#at").dataset, { first, last } = $("#track").dataset;
  for (const [name, at] of [["here", step], ["base", base]]) {
    const line = $(`#track .${name}`), x = `${100 * (at - first) / Math.max(last - first, 1)}%`;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("y2", at === "" ? 0 : 44);
  }
  const range = $("[data-scrubber]");
  range.defaultValue = step;
  if (wanted === null || String(wanted) === step) range.value = step;
}

function move(by) {
  const range = $("[data-scrubber]"), at = Number(wanted ?? range.value) + by;
  go(Math.min(Math.max(at, Number(range.min)), Number(range.max)));
}

document.addEventListener("input", event => { if (event.target.matches("[data-scrubber]")) go(Number(event.target.value)); });
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (event.target.matches("input, select, textarea")) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) { event.preventDefault(); move(by); }
});
document.addEventListener("refreshed", () => {  // the head may have moved on
  const { first, last } = $("#track").dataset, range = $("[data-scrubber]");
  range.min = first;
  range.max = last;
  if (isReading) return;
  wanted = null;
  mark();
});
const moved = $("[data-scrubber]");  // before this script was there
if (moved && moved.value !== moved.defaultValue) go(Number(moved.value));
