//! Generates docs/chart.md: the chart's values, from the comments of values.yaml and the types of values.schema.json.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};
use fs_err as fs;
use serde_json::Value;

use crate::workspace::Workspace;

const HEAD: &str = "\
# Values of the chart

`cargo xtask build docs` makes this page from [values.yaml](../deploy/chart/values.yaml) and [values.schema.json](../deploy/chart/values.schema.json). Helm refuses values that do not fit the schema. [quickstart.md](quickstart.md) shows how to install.

| value | type | default | |
|---|---|---|---|
";

/// A key of values.yaml.
#[derive(Debug, Default, PartialEq, Eq)]
struct Row {
    /// All names from the root: `image.tag`.
    key: String,
    /// The text after the key, and the lines below it that have no row of their own.
    default: String,
    /// The comment above the key.
    meaning: String,
}

/// Returns the text of the page.
pub(super) fn page(workspace: &Workspace) -> Result<String> {
    let read = |name: &str| fs::read_to_string(workspace.root().join("deploy/chart").join(name));
    let schema: Value = serde_json::from_str(&read("values.schema.json")?).context("values.schema.json")?;
    table(&read("values.yaml")?, &schema)
}

/// Returns each example in a comment of values.yaml, as a document with this value alone: `otlp: {sample: [1]}`.
pub(crate) fn examples(values: &str) -> Vec<String> {
    let document = |Row { key, meaning, .. }: Row| {
        let example = flow(&meaning)?;
        let within = |inner: String, name: &str| format!("{{{name}: {inner}}}");
        Some(key.rsplit('.').fold(example.to_owned(), within) + "\n")
    };
    rows(values).into_iter().filter_map(document).collect()
}

/// Returns the first list or map of YAML in a text.
fn flow(text: &str) -> Option<&str> {
    let text = &text[text.find(['{', '['])?..];
    let mut depth = 0_usize;
    for (at, one) in text.char_indices() {
        match one {
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return text.get(..=at);
        }
    }
    None
}

fn table(values: &str, schema: &Value) -> Result<String> {
    let mut text = HEAD.to_owned();
    for Row { key, default, meaning } in rows(values) {
        if meaning.is_empty() && default.is_empty() {
            // A group without a comment needs no row beside those of its fields.
            continue;
        }
        if meaning.is_empty() {
            bail!("deploy/chart/values.yaml: `{key}` has no comment");
        }
        let Some(kind) = kind(schema, &key) else {
            bail!("deploy/chart/values.schema.json does not contain `{key}`");
        };
        let default = if default.is_empty() { default } else { format!("`{default}`") };
        // Writing to a String does not fail.
        let _ = writeln!(text, "| `{key}` | {kind} | {default} | {} |", meaning.replace('|', "\\|"));
    }
    Ok(text)
}

/// Returns a row for every key. A line that is no key, like an element of a list, belongs to the default of the key above it.
fn rows(values: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut comment = String::new();
    // The indentation and the name of the current key and of each key above it.
    let mut above: Vec<(usize, &str)> = Vec::new();
    for line in values.lines() {
        let (indent, code) = (line.len() - line.trim_start().len(), line.trim());
        if code.is_empty() {
            comment.clear();
        } else if let Some(more) = code.strip_prefix('#') {
            let space = if comment.is_empty() { "" } else { " " };
            comment.push_str(space);
            comment.push_str(more.trim());
        } else if let Some((name, default)) = code.split_once(':').filter(|_| !code.starts_with("- ")) {
            above.retain(|(depth, _)| *depth < indent);
            above.push((indent, name));
            let key = above.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(".");
            let default = default.trim().to_owned();
            rows.push(Row { key, default, meaning: std::mem::take(&mut comment) });
        } else if let Some(last) = rows.last_mut() {
            let space = if last.default.is_empty() { "" } else { " " };
            last.default.push_str(space);
            last.default.push_str(code);
        }
    }
    rows
}

/// Returns the type of a value for the page: empty below an object with any keys, `None` if the schema lacks the value.
fn kind(schema: &Value, key: &str) -> Option<String> {
    let mut here = schema;
    for name in key.split('.') {
        if here["properties"].is_null() && here["additionalProperties"] != false && here["type"] == "object" {
            return Some(String::new());
        }
        here = here["properties"].get(name)?;
        if let Some(path) = here["$ref"].as_str() {
            here = schema.pointer(path.trim_start_matches('#'))?;
        }
    }
    if let Some(values) = here["enum"].as_array() {
        let one = |value: &Value| format!("`{}`", value.as_str().unwrap_or_default());
        return Some(values.iter().map(one).collect::<Vec<_>>().join(", "));
    }
    if let Some(kinds) = here["oneOf"].as_array() {
        let one = |kind: &Value| kind["type"].as_str().map(str::to_owned);
        return Some(kinds.iter().filter_map(one).collect::<Vec<_>>().join(" or "));
    }
    match here["type"].as_str()? {
        "array" => Some("list".to_owned()),
        kind => Some(kind.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: &str = "# About the file.\n\n# A group.\ngroup:\n  # First,\n  # second line.\n  one: 1\n  # More.\n  list:\n    - a: b\n\n# Last: either.\nlast: \"on\"\n";

    fn schema() -> Value {
        serde_json::json!({ "properties": {
            "group": { "type": "object", "properties": { "one": { "type": "integer" }, "list": { "type": "array" } } },
            "last": { "enum": ["on", "off"] },
        } })
    }

    #[test]
    fn a_row_has_type_default_and_comment() {
        let text = table(VALUES, &schema()).unwrap();
        let rows: Vec<_> = text.strip_prefix(HEAD).unwrap().lines().collect();
        let expected = [
            "| `group` | object |  | A group. |",
            "| `group.one` | integer | `1` | First, second line. |",
            "| `group.list` | list | `- a: b` | More. |",
            "| `last` | `on`, `off` | `\"on\"` | Last: either. |",
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn an_example_is_a_document_with_its_value() {
        let values = "# None.\na: 1\n# Like {A: \"b\", C: [d]}, or {E: f}.\nb: {}\nc:\n  d:\n    # All: [--v=4].\n    e: []\n  # Open [.\n  f: 1\n";
        assert_eq!(examples(values), ["{b: {A: \"b\", C: [d]}}\n", "{c: {d: {e: [--v=4]}}}\n"]);
    }

    #[test]
    fn a_value_without_comment_or_type_is_an_error() {
        let error = |values: &str| table(values, &schema()).unwrap_err().to_string();
        assert!(error("last: x\n").contains("`last` has no comment"));
        assert!(error("# New.\nnew: x\n").contains("does not contain `new`"));
    }
}
