"use strict";

// Renders /v1/openapi.json: a card for each group of paths, a line for each path, its fields when it is opened.

let whole = {};

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** What a reference names. */
function found(part) {
  if (!part || !part.$ref) return part;
  return part.$ref.slice(2).split("/").reduce((at, name) => at[name], whole);
}

function kind(schema) {
  const of = found(schema) || {};
  if (of.enum) return of.enum.join(" | ");
  const type = [].concat(of.type || (of.oneOf || []).map(({ type }) => type)).join(" or ") || "any";
  return of.items && of.items.$ref ? `${type} of ${of.items.$ref.split("/").pop()}` : type;
}

function fields(schema) {
  const of = found(schema) || {};
  const table = element("table");
  for (const [name, field] of Object.entries(of.properties || {})) {
    const row = element("tr");
    const needed = (of.required || []).includes(name) ? " *" : "";
    row.append(element("td", name + needed), element("td", kind(field)), element("td", found(field).description || "", "quiet"));
    table.append(row);
  }
  const scroll = element("div", undefined, "scroll");
  scroll.append(table);
  return scroll;
}

function operation(path, method, about) {
  const made = element("details");
  const head = element("summary");
  head.append(element("strong", `${method.toUpperCase()} ${path}`), element("span", ` ${about.summary}`, "quiet"));
  made.append(head);
  const body = about.requestBody?.content["application/json"].schema;
  if (found(body)?.properties) made.append(element("p", "Body; * is needed"), fields(body));
  for (const [status, one] of Object.entries(about.responses)) {
    const response = found(one);
    const schema = response.content?.["application/json"]?.schema;
    made.append(element("p", `${status}: ${response.description}`));
    if (status === "200" && found(schema)?.properties) made.append(fields(schema));
  }
  return made;
}

async function show() {
  whole = await (await fetch("/v1/openapi.json")).json();
  document.getElementById("about").textContent = `version ${whole.info.version}. ${whole.info.description}`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const group = about.tags[0];
      if (!groups.has(group)) {
        const card = element("section", undefined, "card wide");
        card.append(element("h2", group));
        groups.set(group, card);
      }
      groups.get(group).append(operation(path, method, about));
    }
  }
  document.getElementById("paths").replaceChildren(...groups.values());
}

show();
