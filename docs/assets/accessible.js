// What the theme's script adds to a page, made usable without a mouse: tables wider than the window take the keyboard's
// focus, so that the arrow keys scroll them, and the copy buttons of the code blocks are no landmarks.
function accessible() {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (wrap.scrollWidth > wrap.clientWidth) {
      wrap.tabIndex = 0;
      wrap.setAttribute("role", "group");
      wrap.setAttribute("aria-label", "Wide table");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) wrap.removeAttribute(name);
    }
  }
  for (const tools of document.querySelectorAll("nav.md-code__nav")) tools.setAttribute("role", "presentation");
}

new MutationObserver(accessible).observe(document.body, { childList: true, subtree: true });
window.addEventListener("resize", accessible);
window.addEventListener("load", accessible);
accessible();
