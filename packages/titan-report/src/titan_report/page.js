// Draws the figures in the current colour scheme and over the chosen axis; redraws them when the scheme or the axis changes, or a
// run is toggled.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const positions = JSON.parse(document.getElementById("positions")?.textContent ?? "[]");
  const hidden = new Set();
  let axis = "steps";
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
    if (key === "colorscale") return value.map(([at, name]) => [at, colour(name, style)]);
    if (Array.isArray(value)) return value.slice();
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, resolved(item, style, name)]));
    }
    return key.endsWith("color") && typeof value === "string" && value[0] === "@" ? colour(value, style) : value;
  }

  // Positions of a run's steps on the chosen axis.
  const lookup = new Map();
  function places(run) {
    const key = axis + run;
    if (!lookup.has(key)) {
      const { steps } = positions[run];
      lookup.set(key, new Map(steps.map((step, index) => [step, positions[run][axis][index]])));
    }
    return lookup.get(key);
  }

  // Hours up to two days, minutes up to two hours: [factor, name of the unit].
  function unitOfTime(hours) {
    return hours > 48 ? [1 / 24, "days"] : hours > 2 ? [1, "hours"] : hours > 1 / 30 ? [60, "minutes"] : [3600, "seconds"];
  }

  // Moves the curves of a figure over steps to the chosen axis. Axes of other figures have a type.
  function moved(traces, layout) {
    if (axis === "steps" || layout.xaxis.type) return [traces, layout];
    const at = traces.map((trace) => trace.x.map((step) => places(trace.meta.run).get(step) ?? null));
    const known = at.flat().filter((place) => place !== null);
    const last = known.reduce((a, b) => Math.max(a, b), 0);
    const first = known.reduce((a, b) => Math.min(a, b), last);
    const [factor, unit] = axis === "hours" ? unitOfTime(last) : [1, ""];
    const scale = (place) => (place === null ? null : place * factor);
    const text = axis === "hours" ? `${unit} of training` : "tokens";
    const range = first < last ? [scale(first), scale(last)] : undefined;
    const xaxis = {
      ...layout.xaxis, range, autorange: range === undefined, tickformat: axis === "tokens" ? "~s" : "~g", uirevision: axis,
      hoverformat: axis === "tokens" ? ".4s" : ".4~g", title: { ...layout.xaxis.title, text },
    };
    return [traces.map((trace, index) => ({ ...trace, x: at[index].map(scale) })), { ...layout, xaxis }];
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const element of document.querySelectorAll("[data-of-run]")) {
      element.hidden = hidden.has(Number(element.dataset.ofRun));
    }
    for (const [id, { data, layout }] of Object.entries(figures)) {
      if (document.getElementById(id).closest("[hidden]")) continue;
      const traces = data.map((trace) => ({ ...resolved(trace, style), visible: !hidden.has(trace.meta.run) }));
      const toImageButtonOptions = { filename: id, scale: 2 };
      const save = { modeBarButtons: [["toImage"]], displaylogo: false, toImageButtonOptions };
      const config = { responsive: true, doubleClick: "reset", ...save };
      const [drawn, around] = moved(traces, resolved(layout, style));
      Plotly.react(id, drawn, { ...around, dragmode }, config);
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
  const axes = document.querySelectorAll("[data-axis]");
  for (const button of axes) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const each of axes) each.setAttribute("aria-pressed", String(each === button));
      draw();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
