//! `ballast map dump`.

use serde::Serialize;
use serde_json::Value;

use crate::maps::view::Entry;
use proxy_cli::output::{Column, List, Row};

/// An entry of a map.
#[derive(Debug, Serialize)]
pub struct EntryJson {
    key: Value,
    value: Value,
}

/// Returns one row for each entry.
pub fn list(entries: Vec<Entry>) -> List<EntryJson> {
    let columns = [Column::new("KEY"), Column::new("VALUE")];
    let mut list = List::new("entries", columns, "No entries, or all entries are zero.");
    for (key, value) in entries {
        let (name, cells) = (text(&key), vec![text(&key), text(&value)]);
        list.push(Row { group: "entries", key: name.clone(), name, cells, value: EntryJson { key, value } });
    }
    list
}

/// Returns a value as text for people, like `a=1 b=[x,y]`.
fn text(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(name, value)| format!("{name}={}", text(value))).collect();
            fields.join(" ")
        }
        Value::Array(all) => format!("[{}]", all.iter().map(text).collect::<Vec<_>>().join(",")),
        Value::String(text) if text.is_empty() => "\"\"".to_owned(),
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_cli::args::list::Output;
    use serde_json::json;

    #[test]
    fn an_entry_as_a_line_and_as_json() {
        let entries = || vec![(json!({"address": "10.0.0.1"}), json!({"bits": [1, 2], "none": null}))];
        let text = list(entries()).render(Output::Text, false).unwrap();
        assert_eq!(text, "address=10.0.0.1  bits=[1,2] none=-\n");
        let json: Value = serde_json::from_str(&list(entries()).render(Output::Json, true).unwrap()).unwrap();
        assert_eq!(json["entries"][0]["key"]["address"], "10.0.0.1");
    }
}
