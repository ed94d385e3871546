//! The rules by which netfilter masquerades the packets that the programs mark (`--masquerade-external`), and drops those that it
//! cannot masquerade.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rtnetlink::sys::Socket;

use super::expressions;
use super::kube_proxy_rules::{chains, family as family_name};
use super::message::{self, IPV4, IPV6, Message, transact, transact_by};
use super::rules::{APPEND, CREATE, base_chain, delete_table, new_own_table, new_table, rule_of};
use proxy_core::model::net::IpFamily;

/// Ballast's table, in the families ip and ip6. The names of its chains tell the mark.
const TABLE: &str = "ballast";
/// The agent's own table with the same chains.
const OWN_TABLE: &str = "ballast-own";
/// The chain that stays while nothing is masqueraded any more.
const IDLE: &str = "masquerade-off";
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

/// Creates the rules for packets with this mark if one is missing, in place of those for another mark. 0: a table that exists keeps
/// only a chain of type `nat` with a rule that decides nothing, without which the kernel would no longer translate the packets of
/// connections.
/// Returns the families that are as wanted now: a kernel may have no rules for IPv6. An error: the rules could not be read.
pub fn ensure(mark: u32) -> io::Result<BTreeSet<IpFamily>> {
    let found = found()?;
    let wanted = if mark == 0 { BTreeSet::from([IDLE.to_owned()]) } else { names_of(mark).into() };
    Ok(in_each_family(|family| {
        let has = found.get(&family);
        if has == Some(&wanted) || mark == 0 && has.is_none() {
            return Ok(());
        }
        let delete = has.map(|_| (delete_table(family, TABLE), 0));
        transact(&delete.into_iter().chain(create(family, mark)).collect::<Vec<_>>())
    }))
}

/// Removes the table; returns whether it existed.
pub fn remove() -> io::Result<bool> {
    let found = found()?;
    found.keys().try_for_each(|family| transact(&[(delete_table(*family, TABLE), 0)]))?;
    Ok(!found.is_empty())
}

/// Changes both families, each for itself; returns those in which the change succeeded.
fn in_each_family(change: impl Fn(u8) -> io::Result<()>) -> BTreeSet<IpFamily> {
    let succeeds = |family| {
        let changed = change(family);
        if let Err(error) = &changed {
            let family = family_name(family);
            tracing::debug!(%error, family, "cannot change the rules of netfilter");
        }
        changed.is_ok()
    };
    let families = [(IPV4, IpFamily::V4), (IPV6, IpFamily::V6)];
    families.into_iter().filter(|(family, _)| succeeds(*family)).map(|(_, family)| family).collect()
}

fn create(family: u8, mark: u32) -> Vec<(Message, u16)> {
    let mut messages = vec![(new_table(family, TABLE), CREATE)];
    if mark == 0 {
        messages.push((base_chain(family, TABLE, (IDLE, POSTROUTING.0, POSTROUTING.1), "nat"), CREATE));
        // The kernel tracks connections only while a rule reads their state.
        messages.push((rule_of(family, TABLE, IDLE, &expressions::ct_state()), APPEND));
    } else {
        messages.extend(chains_in(TABLE, family, mark));
    }
    messages
}

/// Returns the messages that create the chains with their rules in a table.
fn chains_in(table: &str, family: u8, mark: u32) -> [(Message, u16); 4] {
    let [masquerade, invalid] = names_of(mark);
    let (nat, filter) = (POSTROUTING, FORWARD);
    [
        (base_chain(family, table, (&masquerade, nat.0, nat.1), "nat"), CREATE),
        (rule_of(family, table, &masquerade, &expressions::masquerade_marked(mark)), APPEND),
        (base_chain(family, table, (&invalid, filter.0, filter.1), "filter"), CREATE),
        (rule_of(family, table, &invalid, &expressions::drop_marked_invalid(mark)), APPEND),
    ]
}

/// The rules as the agent keeps them: in the table that stays without the agent, and in one that only the agent can delete. While
/// no chain of type `nat` exists, the kernel does not translate the packets of masqueraded connections, and their endpoints
/// reset them; so a program that deletes all rules (`nft flush ruleset`) has to leave one.
#[derive(Clone, Debug, Default)]
pub struct Masquerade {
    mark: u32,
    /// The socket that owns the second table.
    owner: Arc<Mutex<Option<Socket>>>,
}

impl Masquerade {
    /// Returns the rules for packets with this mark, which are not created yet; 0: there shall be none.
    pub fn new(mark: u32) -> Self {
        Self { mark, owner: Arc::default() }
    }

    /// Whether there shall be rules.
    pub const fn is_wanted(&self) -> bool {
        self.mark != 0
    }

    /// Creates what is missing, in the network namespace of the calling thread; returns what [`ensure`] returns.
    pub fn ensure(&self) -> io::Result<BTreeSet<IpFamily>> {
        let families = ensure(self.mark)?;
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        if owner.is_none() && self.is_wanted() {
            // The first table suffices until all rules are deleted.
            *owner = own(self.mark)
                .inspect_err(
                    |error| tracing::debug!(%error, "cannot create a table of nftables that has an owner"),
                )
                .ok();
        }
        drop(owner);
        Ok(families)
    }
}

/// Creates the agent's own table in both families, and returns the socket that owns it.
fn own(mark: u32) -> io::Result<Socket> {
    let socket = message::open()?;
    let owned = in_each_family(|family| {
        let table = std::iter::once((new_own_table(family, OWN_TABLE), CREATE));
        transact_by(&socket, &table.chain(chains_in(OWN_TABLE, family, mark)).collect::<Vec<_>>())
    });
    if owned.is_empty() { Err(io::ErrorKind::Unsupported.into()) } else { Ok(socket) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_whose_change_fails_is_not_returned() {
        let fails_in = |failing| {
            in_each_family(
                |family| if family == failing { Err(io::ErrorKind::Unsupported.into()) } else { Ok(()) },
            )
        };
        assert_eq!(fails_in(IPV6), BTreeSet::from([IpFamily::V4]));
        assert_eq!(fails_in(0), BTreeSet::from([IpFamily::V4, IpFamily::V6]));
    }
}
