/** Make an element: h("p", { class: "quiet", onclick: go }, "text", child, …). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Attributes of an element that is picked with the mouse, or with Enter. */
export function picks(go) {
  return { tabindex: 0, role: "button", onclick: go, onkeydown: (event) => event.key === "Enter" && go() };
}

/** Write on a canvas. */
export function drawText(context, text, x, y, colour, { size = 11, align = "left", base = "middle", bold = "" } = {}) {
  Object.assign(context, { fillStyle: colour, font: `${bold}${size}px system-ui, sans-serif`, textAlign: align, textBaseline: base });
  context.fillText(text, x, y);
}

export function drawLine(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** Offer text for download as a file. */
export function download(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
