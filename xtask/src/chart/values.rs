//! Checks that the schema of the chart has a type for each value, and that a case sets the value and changes a manifest.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::helm::Helm;

/// A value, a group of values, or an element of a list or a map.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    /// Names and positions, from the root of the values.
    path: Vec<String>,
    /// Whether the node is a value that users set, neither a group nor an element.
    is_value: bool,
}

impl Node {
    /// Returns the path in the syntax of `--set`: `imagePullSecrets[0].name`.
    fn key(&self) -> String {
        let part = |name: &String| match name.parse::<usize>() {
            Ok(position) => format!("[{position}]"),
            Err(_) => format!(".{name}"),
        };
        self.path.iter().map(part).collect::<String>().trim_start_matches('.').to_owned()
    }

    /// Whether an argument of `--set` sets the node, or a part of it.
    fn is_set_by(&self, argument: &str) -> bool {
        let rest = argument.strip_prefix(&self.key());
        rest.is_some_and(|rest| rest.starts_with(['=', '.', '[']))
    }
}

/// Arguments of `--set`, and the manifests that the chart renders with them.
type Rendered<'a> = (&'a [&'a str], String);

/// Checks that cases change each value; `cases` are arguments of `--set`.
pub(super) fn check(helm: &Helm, cases: &[Vec<&str>]) -> Result<()> {
    let path = helm.chart().join("values.schema.json");
    let text = fs_err::read_to_string(&path)?;
    let schema = serde_json::from_str(&text).context("values.schema.json")?;
    let nodes = nodes(&schema)?;
    let cases: Vec<Rendered<'_>> =
        cases.iter().map(|values| Ok((&**values, helm.render(values)?))).collect::<Result<_>>()?;
    let mut missed = Vec::new();
    for node in nodes.iter().filter(|node| node.is_value) {
        if !is_shown(helm, node, &cases) {
            missed.push(node.key());
        }
    }
    ensure!(missed.is_empty(), "no case of the chart changes a manifest by {}", missed.join(", "));
    Ok(())
}

/// Whether the manifests of a case that sets the value differ from those without the value.
fn is_shown(helm: &Helm, node: &Node, cases: &[Rendered<'_>]) -> bool {
    cases.iter().any(|(values, manifests)| {
        let others: Vec<&str> = values.iter().copied().filter(|value| !node.is_set_by(value)).collect();
        // If a required value is missing, Helm refuses the other values, which also counts as a difference.
        others.len() < values.len() && helm.render(&others).ok().as_ref() != Some(manifests)
    })
}

/// Returns all nodes of a schema.
fn nodes(schema: &Value) -> Result<Vec<Node>> {
    let mut nodes = Vec::new();
    for (name, value) in schema["properties"].as_object().into_iter().flatten() {
        // Keys of a parent chart, without effect here: what it passes to all charts, and the condition of a dependency.
        if !["global", "enabled"].contains(&name.as_str()) {
            collect(schema, value, vec![name.clone()], true, &mut nodes)?;
        }
    }
    Ok(nodes)
}

fn collect(
    root: &Value,
    schema: &Value,
    path: Vec<String>,
    can_be_value: bool,
    nodes: &mut Vec<Node>,
) -> Result<()> {
    let schema = match schema["$ref"].as_str() {
        Some(target) => root.pointer(target.trim_start_matches('#')).context("a $ref leads nowhere")?,
        None => schema,
    };
    let below = |name: &str| path.iter().cloned().chain([name.to_owned()]).collect::<Vec<_>>();
    let properties = schema["properties"].as_object();
    let is_group = properties.is_some() && schema["additionalProperties"] == false;
    for (name, value) in properties.into_iter().flatten() {
        collect(root, value, below(name), can_be_value, nodes)?;
    }
    if schema["items"].is_object() {
        collect(root, &schema["items"], below("0"), false, nodes)?;
    }
    if schema["additionalProperties"].is_object() {
        collect(root, &schema["additionalProperties"], below("x"), false, nodes)?;
    }
    for (pattern, value) in schema["patternProperties"].as_object().into_iter().flatten() {
        let (prefix, _) =
            pattern.trim_start_matches('^').split_once('[').context("a pattern without class")?;
        collect(root, value, below(&format!("{prefix}X")), false, nodes)?;
    }
    if ["type", "enum", "oneOf"].iter().all(|key| schema[*key].is_null()) {
        bail!("the chart's schema names no type of {}", path.join("."));
    }
    nodes.push(Node { path, is_value: can_be_value && !is_group });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Vec<Node> {
        let schema = serde_json::json!({
            "definitions": { "d": { "type": "object", "additionalProperties": false, "properties": { "a": { "enum": ["x"] } } } },
            "properties": {
                "global": { "type": "object" },
                "enabled": { "type": "boolean" },
                "group": { "$ref": "#/definitions/d" },
                "free": { "type": "object", "properties": { "known": { "type": "string" } } },
                "list": { "type": "array", "items": { "oneOf": [{ "type": "integer" }, { "type": "string" }] } },
                "map": { "type": "object", "patternProperties": { "^A_[A-Z]+$": { "type": "string" } } },
            },
        });
        nodes(&schema).unwrap()
    }

    #[test]
    fn a_schema_names_values_groups_and_elements() {
        let all: Vec<_> = found().iter().map(|node| (node.key(), node.is_value)).collect();
        let expected = [
            ("free.known", true),
            ("free", true),
            ("group.a", true),
            ("group", false),
            ("list[0]", false),
            ("list", true),
            ("map.A_X", false),
            ("map", true),
        ];
        assert_eq!(all, expected.map(|(key, is_value)| (key.to_owned(), is_value)));
    }

    #[test]
    fn an_argument_sets_a_value_or_a_part_of_it() {
        let nodes = found();
        let list = nodes.iter().find(|node| node.key() == "list").unwrap();
        assert!(["list=1", "list[0]=1", "list.a=1"].iter().all(|argument| list.is_set_by(argument)));
        assert!(!["lists=1", "group.list=1", "list"].iter().any(|argument| list.is_set_by(argument)));
    }
}
