// Markdown of a model as elements of the page. markdown-it shows HTML as text; DOMPurify removes what is not listed here.

const markdown = globalThis.markdownit({ html: false, linkify: true, breaks: true }).disable("image");
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "start"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true,
};

export const clean = (html) => globalThis.DOMPurify.sanitize(html, ALLOWED);

function framed(element, name) {
  const frame = Object.assign(document.createElement("div"), { className: name });
  element.replaceWith(frame);
  frame.append(element);
}

export function rendered(text) {
  const part = clean(markdown.render(text));
  for (const link of part.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of part.querySelectorAll("table")) framed(table, "wide-table");
  for (const block of part.querySelectorAll("pre")) framed(block, "code");
  return part;
}
