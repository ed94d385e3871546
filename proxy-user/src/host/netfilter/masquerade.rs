//! The rule by which netfilter masquerades the packets that the programs mark (`--masquerade-external`).

use std::collections::BTreeMap;
use std::io;

use super::expressions;
use super::kube_proxy_rules::chains;
use super::message::{IPV4, IPV6, Message, NFTABLES, transact};
use super::rules::{APPEND, CREATE, NEW_TABLE, TABLE_NAME, base_chain, delete_table, rule_of};

/// Ballast's table, in the families ip and ip6. It has one chain, whose name tells the mark.
const TABLE: &str = "ballast";
/// The number and priority of the hook of its chain.
const HOOK: (u32, i32) = (4, 100);

/// Returns the name of the chain for the packets with this mark.
fn name_of(mark: u32) -> String {
    format!("masquerade-{mark:#x}")
}

/// The families in which the table exists, and the name of its chain in each.
fn found() -> io::Result<BTreeMap<u8, String>> {
    let ours =
        chains()?.into_iter().filter(|chain| chain.table == TABLE && [IPV4, IPV6].contains(&chain.family));
    Ok(ours.map(|chain| (chain.family, chain.name)).collect())
}

/// Whether the table exists in any family.
pub fn exists() -> io::Result<bool> {
    found().map(|found| !found.is_empty())
}

/// Creates the rule for packets with this mark if it is missing, in place of one for another mark; 0: removes the table.
pub fn ensure(mark: u32) -> io::Result<()> {
    let (found, wanted) = (found()?, (mark != 0).then(|| name_of(mark)));
    let mut changes = Vec::new();
    for family in [IPV4, IPV6] {
        let has = found.get(&family);
        if has != wanted.as_ref() {
            changes.extend(has.map(|_| (delete_table(family, TABLE), 0)));
            changes.extend(wanted.iter().flat_map(|chain| create(family, chain, mark)));
        }
    }
    if changes.is_empty() { Ok(()) } else { transact(&changes) }
}

fn create(family: u8, chain: &str, mark: u32) -> [(Message, u16); 3] {
    [
        (Message::new(NFTABLES, NEW_TABLE, family).with_text(TABLE_NAME, TABLE), CREATE),
        (base_chain(family, TABLE, (chain, HOOK.0, HOOK.1), "nat"), CREATE),
        (rule_of(family, TABLE, chain, &expressions::masquerade_marked(mark)), APPEND),
    ]
}
