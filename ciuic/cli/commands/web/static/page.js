"use strict";
// Everything works without this file: it keeps open pages fresh and shows progress. Text is only ever put in as text.
(() => {
  const told = document.getElementById("live");
  // A browser has six connections to one host, for all of its tabs: one that nobody sees holds none.
  const listen = (address, acts) => {
    let events = null;
    const turn = () => {
      if (events) events.close();
      events = document.hidden ? null : new EventSource(address);
      if (events) for (const [kind, act] of Object.entries(acts)) events.addEventListener(kind, act);
    };
    document.addEventListener("visibilitychange", turn);
    turn();
    return () => { document.removeEventListener("visibilitychange", turn); if (events) events.close(); };
  };
  const follow = (number, change, end) => {
    const close = listen("/action/events?n=" + encodeURIComponent(number), {
      progress: (event) => change(JSON.parse(event.data).state),
      end: () => { close(); end(); },
    });
  };
  const fill = (bar, state) => { if (bar && state.bytes_total) { bar.max = state.bytes_total; bar.value = state.bytes_done; } };
  const action = document.getElementById("action");
  if (action) {
    const text = document.getElementById("action-text");
    follow(action.dataset.action, (state) => {
      fill(action.querySelector("progress"), state);
      if (state.files_total) text.textContent = `${state.files_done} of ${state.files_total} files. It goes on when this page is closed.`;
    }, () => location.reload());
    return;
  }
  let waiting = 0;
  // A form is left alone while somebody is at it: it has the focus, or a field is not as the page came.
  const touched = (form) => form.contains(document.activeElement) || [...form.elements].some((field) =>
    field.type === "checkbox" ? field.checked !== field.defaultChecked
      : field.options ? [...field.options].some((option) => option.selected !== option.defaultSelected) && field.selectedIndex > 0
        : "defaultValue" in field && field.value !== field.defaultValue);
  const anyTouched = () => [...document.forms].some(touched);
  const isLive = "live" in document.body.dataset;
  for (const one of [...document.querySelectorAll("[data-running]")].slice(0, 2)) {
    const number = one.dataset.running;
    follow(number, (state) => fill(document.querySelector(`[data-running="${number}"] progress`), state), () => {
      if (isLive) later(0); else if (!anyTouched()) location.reload();
    });
  }
  if (!isLive) return;
  // Only what is different is replaced, so that focus, selection and scrolling stay where they are.
  const merge = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    const head = (node) => node.cloneNode(false);
    if (old.nodeType !== Node.ELEMENT_NODE || !head(old).isEqualNode(head(fresh))) {
      if (!(old.querySelectorAll && [...old.querySelectorAll("form")].some(touched))) old.replaceWith(fresh);
      return;
    }
    if (old.nodeName === "FORM" && touched(old)) return;
    const [mine, theirs] = [[...old.childNodes], [...fresh.childNodes]];
    // From the end, where the forms of a page are: banners come and go at its beginning.
    const shared = Math.min(mine.length, theirs.length);
    for (let at = 1; at <= shared; at++) merge(mine[mine.length - at], theirs[theirs.length - at]);
    for (const node of mine.slice(0, mine.length - shared)) node.remove();
    old.prepend(...theirs.slice(0, theirs.length - shared));
  };
  const refresh = async () => {
    waiting = 0;
    if (document.hidden) { later(5000); return; }
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) {
        if (anyTouched()) { told.textContent = "this page is out of date: load it again"; later(5000); } else location.reload();
        return;
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = document.getElementById("main");
      const focused = main.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      merge(main, page.getElementById("main"));
      if (focused && document.activeElement.getAttribute("href") !== focused) {
        const again = [...main.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused);
        if (again) again.focus();
      }
      told.textContent = "live";
      draw();
    } catch (error) { told.textContent = "the page's server does not answer"; later(5000); }
  };
  // The curves take longer than a page may: they come after it.
  const draw = async () => {
    if (!document.querySelector("#picture[data-wanted]")) return;
    try {
      const answer = await fetch("/picture", { credentials: "same-origin" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("picture");
      const old = document.getElementById("picture");
      if (old && fresh) merge(old, fresh);
    } catch (error) { /* the next refresh draws it */ }
  };
  const later = (ms) => { if (!waiting) waiting = setTimeout(refresh, ms); };
  let greeted = false;
  listen("/events", {
    ciuic: () => later(400),
    daemon: () => later(400),
    reset: () => later(0),
    // Seen again: what happened meanwhile was not told.
    hello: () => { told.textContent = "live"; if (greeted) later(0); greeted = true; },
    error: () => { told.textContent = "the page's server does not answer"; },
  });
  draw();
  setInterval(() => later(0), 20000);
})();
