//! `ballast map list`.

use std::path::PathBuf;

use proxy_common::map_names as names;
use serde::Serialize;

use super::table::{Table, bytes};
use super::{ShowError, json};
use crate::cli::args::Output;
use crate::maps::view::UsageRow;

/// A map this full, in percent, is a problem to come.
const NEARLY_FULL: u64 = 90;

/// Whether a map is nearly full. The flow table, the LRU maps and what refers to them fill up and reuse their oldest entries.
pub(in crate::cli) fn is_nearly_full(row: &UsageRow) -> bool {
    let full = row.used.is_some_and(|used| u64::from(used) * 100 >= u64::from(row.capacity) * NEARLY_FULL);
    full && !row.kind.starts_with("lru") && ![names::FLOWS, names::FLOWS6].contains(&row.name)
}

/// `{"maps": [...]}`.
#[derive(Serialize)]
struct ListJson {
    maps: Vec<MapJson>,
}

#[derive(Serialize)]
pub(super) struct MapJson {
    name: &'static str,
    /// Number of the map in this kernel, as bpftool shows it.
    id: u32,
    pin: PathBuf,
    /// In the kernel's words.
    r#type: String,
    /// `null` where all entries always are in use.
    used: Option<u32>,
    /// `null` where there is one for each socket.
    capacity: Option<u32>,
    /// Bytes; `null` where the kernel does not tell.
    memory: Option<u64>,
    /// The flag that makes it larger; empty where none does.
    setting: &'static str,
}

/// One line for each map.
pub fn list(rows: &[UsageRow], output: Output) -> Result<String, ShowError> {
    if output == Output::Json {
        return json(&ListJson { maps: rows.iter().map(element).collect() });
    }
    Ok(table(rows, output))
}

fn table(rows: &[UsageRow], output: Output) -> String {
    let headings = ["NAME", "TYPE", "USED", "CAPACITY", "MEMORY", "PIN", "ID", "SETTING"];
    let columns = if output.is_wide() { headings.len() } else { 6 };
    let mut table = Table::new(headings.into_iter().take(columns)).right(&[2, 3, 4, 6]);
    for row in rows {
        let cells = [
            row.name.to_owned(),
            row.kind.clone(),
            row.used.map_or_else(|| "-".to_owned(), |used| used.to_string()),
            if row.capacity == 0 { "-".to_owned() } else { row.capacity.to_string() },
            row.memory.map_or_else(|| "-".to_owned(), bytes),
            row.pin.display().to_string(),
            row.id.to_string(),
            row.setting.to_owned(),
        ];
        table.row(cells.into_iter().take(columns));
    }
    table.render("No maps.")
}

pub(super) fn element(row: &UsageRow) -> MapJson {
    MapJson {
        name: row.name,
        id: row.id,
        pin: row.pin.clone(),
        r#type: row.kind.clone(),
        used: row.used,
        capacity: (row.capacity != 0).then_some(row.capacity),
        memory: row.memory,
        setting: row.setting,
    }
}
