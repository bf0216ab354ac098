// Draws the figures in the current colour scheme; redraws them when the scheme changes or a run is toggled.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set();
  // Touch scrolls the page. With a mouse, dragging zooms into the chart and a double click resets it.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  // "@run-0/0.4" is the CSS variable --run-0 with an opacity of 0.4.
  function colour(name, style) {
    const [variable, opacity] = name.slice(1).split("/");
    const hex = style.getPropertyValue("--" + variable).trim();
    if (opacity === undefined) return hex;
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${red}, ${green}, ${blue}, ${opacity})`;
  }

  // Returns a copy with colours resolved: plotly modifies its arguments.
  function resolved(value, style, key = "") {
    if (Array.isArray(value)) return value.slice();
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, resolved(item, style, name)]));
    }
    return key.endsWith("color") && typeof value === "string" && value[0] === "@" ? colour(value, style) : value;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const element of document.querySelectorAll("[data-of-run]")) {
      element.hidden = hidden.has(Number(element.dataset.ofRun));
    }
    for (const [id, { data, layout }] of Object.entries(figures)) {
      if (document.getElementById(id).closest("[hidden]")) continue;
      const traces = data.map((trace) => ({ ...resolved(trace, style), visible: !hidden.has(trace.meta.run) }));
      const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };
      Plotly.react(id, traces, { ...resolved(layout, style), dragmode }, config);
    }
  }

  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      chip.setAttribute("aria-pressed", String(!hidden.has(run)));
      draw();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
