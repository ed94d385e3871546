//! The rules by which netfilter masquerades the packets that the programs mark (`--masquerade-external`), and drops those that it
//! cannot masquerade.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::expressions;
use super::kube_proxy_rules::chains;
use super::message::{IPV4, IPV6, Message, NFTABLES, transact};
use super::rules::{APPEND, CREATE, NEW_TABLE, TABLE_NAME, base_chain, delete_table, rule_of};

/// Ballast's table, in the families ip and ip6. The names of its chains tell the mark.
const TABLE: &str = "ballast";
/// The numbers and priorities of the hooks of its chains: postrouting and forward.
const POSTROUTING: (u32, i32) = (4, 100);
const FORWARD: (u32, i32) = (2, 0);

/// Returns the names of the chains for the packets with this mark: of type `nat`, and of type `filter`.
fn names_of(mark: u32) -> [String; 2] {
    [format!("masquerade-{mark:#x}"), format!("drop-invalid-{mark:#x}")]
}

/// The families in which the table exists, and the names of its chains in each.
fn found() -> io::Result<BTreeMap<u8, BTreeSet<String>>> {
    let mut found: BTreeMap<u8, BTreeSet<String>> = BTreeMap::new();
    for chain in chains()? {
        if chain.table == TABLE && [IPV4, IPV6].contains(&chain.family) {
            found.entry(chain.family).or_default().insert(chain.name);
        }
    }
    Ok(found)
}

/// Whether the table exists in any family.
pub fn exists() -> io::Result<bool> {
    found().map(|found| !found.is_empty())
}

/// Creates the rules for packets with this mark if one is missing, in place of those for another mark; 0: removes the table.
pub fn ensure(mark: u32) -> io::Result<()> {
    let (found, wanted) = (found()?, (mark != 0).then(|| BTreeSet::from(names_of(mark))));
    let mut changes = Vec::new();
    for family in [IPV4, IPV6] {
        let has = found.get(&family);
        if has != wanted.as_ref() {
            changes.extend(has.map(|_| (delete_table(family, TABLE), 0)));
            changes.extend(wanted.iter().flat_map(|_| create(family, mark)));
        }
    }
    if changes.is_empty() { Ok(()) } else { transact(&changes) }
}

fn create(family: u8, mark: u32) -> [(Message, u16); 5] {
    let [masquerade, invalid] = names_of(mark);
    let (nat, filter) = (POSTROUTING, FORWARD);
    [
        (Message::new(NFTABLES, NEW_TABLE, family).with_text(TABLE_NAME, TABLE), CREATE),
        (base_chain(family, TABLE, (&masquerade, nat.0, nat.1), "nat"), CREATE),
        (rule_of(family, TABLE, &masquerade, &expressions::masquerade_marked(mark)), APPEND),
        (base_chain(family, TABLE, (&invalid, filter.0, filter.1), "filter"), CREATE),
        (rule_of(family, TABLE, &invalid, &expressions::drop_marked_invalid(mark)), APPEND),
    ]
}
