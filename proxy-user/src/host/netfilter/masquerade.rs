//! The rule by which netfilter masquerades the packets that the programs mark (`--masquerade-external`).

use std::io;

use super::expressions;
use super::kube_proxy_rules::chains;
use super::message::{IPV4, IPV6, Message, NFTABLES, transact};
use super::rules::{APPEND, CREATE, NEW_TABLE, TABLE_NAME, base_chain, delete_table, rule_of};

/// Ballast's table, in the families ip and ip6.
const TABLE: &str = "ballast";
/// The chain: its name, and the number and priority of its hook.
const CHAIN: (&str, u32, i32) = ("postrouting", 4, 100);

/// The families in which the table exists.
fn found() -> io::Result<Vec<u8>> {
    Ok(chains()?.into_iter().filter(|chain| chain.table == TABLE).map(|chain| chain.family).collect())
}

/// Whether the table exists in any family.
pub fn exists() -> io::Result<bool> {
    Ok(found()?.into_iter().any(|family| [IPV4, IPV6].contains(&family)))
}

/// Creates the rule if it is missing, or removes the table if no packets are to be masqueraded.
pub fn ensure(wanted: bool) -> io::Result<()> {
    let found = found()?;
    let changes: Vec<_> = [IPV4, IPV6]
        .into_iter()
        .filter(|family| found.contains(family) != wanted)
        .flat_map(|family| if wanted { create(family) } else { vec![(delete_table(family, TABLE), 0)] })
        .collect();
    if changes.is_empty() { Ok(()) } else { transact(&changes) }
}

fn create(family: u8) -> Vec<(Message, u16)> {
    vec![
        (Message::new(NFTABLES, NEW_TABLE, family).with_text(TABLE_NAME, TABLE), CREATE),
        (base_chain(family, TABLE, CHAIN, "nat"), CREATE),
        (rule_of(family, TABLE, CHAIN.0, &expressions::masquerade_marked()), APPEND),
    ]
}
