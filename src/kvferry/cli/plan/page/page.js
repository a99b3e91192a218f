"use strict";
// Without this script every detail is reached by its link; with it, by looking.
(() => {
  const root = document.documentElement;
  const drawing = document.getElementById("drawing");
  const panel = document.getElementById("panel");
  if (!drawing || !panel) return;
  root.classList.add("scripted");
  const details = new Map([...panel.querySelectorAll(".detail")].map((item) => [item.id, item]));
  const marked = [...document.querySelectorAll("[data-s],[data-t]")];
  let pinned = "";

  function touches(element, wanted) {
    const s = element.dataset.s, t = element.dataset.t;
    const match = (mine, theirs) => mine === undefined || theirs === undefined || mine === theirs;
    return match(s, wanted.s) && match(t, wanted.t);
  }

  function wantedBy(name) {
    const [kind, first, second] = name.split("-");
    if (kind === "pair") return { s: first, t: second };
    return kind === "source" ? { s: first } : { t: first };
  }

  function show(name) {
    const known = details.has(name);
    drawing.classList.toggle("choosing", known);
    panel.classList.toggle("choosing", known);
    root.dataset.shown = known ? name : "";
    const wanted = known ? wantedBy(name) : {};
    // A card is lit by its own rank, and by the ribbons that reach it.
    const reached = new Set();
    for (const ribbon of drawing.querySelectorAll(".ribbon"))
      if (known && touches(ribbon, wanted)) reached.add("source-" + ribbon.dataset.s).add("target-" + ribbon.dataset.t);
    for (const element of marked) {
      const card = element.dataset.card;
      element.classList.toggle("lit", known && (card ? card === name || reached.has(card) : touches(element, wanted)));
    }
    for (const [id, item] of details) item.classList.toggle("shown", id === name);
  }

  function nameOf(event) {
    const link = event.target.closest && event.target.closest("[data-detail]");
    return link ? link.dataset.detail : "";
  }

  function pin(name) {
    pinned = details.has(name) ? name : "";
    history.replaceState(null, "", pinned ? "#" + pinned : location.pathname + location.search);
    show(pinned);
  }

  for (const kind of ["mouseover", "focusin"])
    document.addEventListener(kind, (event) => {
      const name = nameOf(event);
      if (name) show(name);
      else if (kind === "mouseover" && !panel.contains(event.target)) show(pinned);
    });
  document.addEventListener("focusout", () => show(pinned));
  document.addEventListener("click", (event) => {
    const name = nameOf(event);
    if (name) {
      event.preventDefault();
      pin(name === pinned ? "" : name);
    } else if (drawing.contains(event.target)) pin("");
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") pin("");
  });
  const follow = () => {
    const name = location.hash.slice(1);
    pinned = details.has(name) ? name : "";
    show(pinned);
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
