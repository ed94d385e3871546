//! `ballast map list`.

use proxy_common::map_names as names;

use super::error::ShowError;
use crate::maps::view::UsageRow;
use proxy_cli::output::{List, MAPS, Row, bytes};

/// Percentage of used entries at which a map counts as nearly full.
const NEARLY_FULL: u64 = 90;

/// Whether a map is nearly full. Flows, sockets and LRU maps are excluded: they fill up, and reuse their oldest entries.
pub(in crate::cli) fn is_nearly_full(row: &UsageRow) -> bool {
    let full = row.used.is_some_and(|used| u64::from(used) * 100 >= u64::from(row.capacity) * NEARLY_FULL);
    let reused = [names::FLOWS, names::FLOWS6, names::SOCKETS, names::SOCKETS6];
    full && !row.kind.starts_with("lru") && !reused.contains(&row.name)
}

/// Returns one row for each map in `names`, or for every map if `names` is empty.
pub fn list(rows: &[UsageRow], names: &[String]) -> Result<List<UsageRow>, ShowError> {
    for asked in names {
        if !rows.iter().any(|row| row.name == asked) {
            return Err(ShowError::no_map(asked, rows.iter().map(|row| row.name)));
        }
    }
    let mut list = List::new("maps", MAPS, "No maps.");
    for row in rows.iter().filter(|row| names.is_empty() || names.iter().any(|name| name == row.name)) {
        let cells = vec![
            row.name.to_owned(),
            row.kind.clone(),
            row.used.map_or_else(|| "-".to_owned(), |used| used.to_string()),
            if row.capacity == 0 { "-".to_owned() } else { row.capacity.to_string() },
            row.memory.map_or_else(|| "-".to_owned(), bytes),
            row.pin.display().to_string(),
            row.id.to_string(),
            row.setting.to_owned(),
        ];
        let name = row.name.to_owned();
        list.push(Row { group: "maps", key: name.clone(), name, cells, value: row.clone() });
    }
    Ok(list)
}
