// Before anything is drawn: the colours that were chosen here before. A plain script, so that no page flashes.
(() => {
  const known = ["auto", "light", "dark"];
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("tidegate-theme") ?? "auto";
  } catch {
    // A browser that keeps nothing for this page: it follows the system.
  }
  document.documentElement.dataset.theme = known.includes(chosen) ? chosen : "auto";
})();
