// Signs that differ in shape, not only in colour.

import { s } from "./dom.js";

const SHAPES = {
  ok: () => [s("circle", { cx: 8, cy: 8, r: 7 }), s("path", { class: "sign", d: "M4.6 8.3l2.3 2.3 4.4-4.8" })],
  warn: () => [s("path", { d: "M8 .9l7.4 13.6H.6z" }), s("path", { class: "sign", d: "M8 5.6v4.2M8 11.7v.9" })],
  bad: () => [s("path", { d: "M5 .8h6L15.2 5v6L11 15.2H5L.8 11V5z" }), s("path", { class: "sign", d: "M5.3 5.3l5.4 5.4M10.7 5.3l-5.4 5.4" })],
  busy: () => [s("circle", { class: "ring", cx: 8, cy: 8, r: 6 }), s("path", { d: "M8 2a6 6 0 0 1 0 12z" })],
  off: () => [s("rect", { class: "ring", x: 2, y: 2, width: 12, height: 12, rx: 2 }), s("rect", { x: 5.5, y: 5.5, width: 5, height: 5 })],
  info: () => [s("circle", { class: "ring", cx: 8, cy: 8, r: 6 }), s("circle", { cx: 8, cy: 8, r: 2 })],
};

/** Beside a word that says the same, so screen readers pass it over. */
export function icon(level) {
  return s("svg", { class: `icon ${level}`, viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, ...SHAPES[level]());
}
