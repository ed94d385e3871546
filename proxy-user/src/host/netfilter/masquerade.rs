//! The rules by which netfilter masquerades the packets that the programs mark (`--masquerade-external`), drops those that it
//! cannot masquerade, and does not track the packets that the programs give to the stack on the loopback device.
//!
//! Rules of other programs in PREROUTING (`CONNMARK --restore-mark`, wg-quick) may set the whole mark before POSTROUTING reads it,
//! so the connection's label keeps the bit.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
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
/// The chain for packets that the programs redirect to the loopback device: conntrack would see one direction of their connections,
/// and call most of them INVALID.
const NOTRACK: &str = "notrack-lo";
/// The numbers and priorities of the hooks of its chains: postrouting, forward, and prerouting before conntrack (-200) and after it,
/// before the rules of others that set marks (-150).
const POSTROUTING: (u32, i32) = (4, 100);
const FORWARD: (u32, i32) = (2, 0);
const BEFORE_CONNTRACK: (u32, i32) = (0, -300);
const AFTER_CONNTRACK: (u32, i32) = (0, -199);

/// Set once the kernel has refused rules for labels of connections (`CONFIG_NF_CONNTRACK_LABELS`), and accepted the others.
static LACKS_LABELS: AtomicBool = AtomicBool::new(false);

/// Returns the names of the chains for the packets with this mark: the one that masquerades, and the one that drops.
fn names_of(mark: u32) -> [String; 2] {
    [format!("masquerade-{mark:#x}"), format!("drop-invalid-{mark:#x}")]
}

/// Returns the name of the chain that copies this mark to the label of connections.
fn label_chain(mark: u32) -> String {
    format!("label-{mark:#x}")
}

/// Returns the names of all chains that the table shall have.
fn wanted(mark: u32, by_label: bool) -> BTreeSet<String> {
    if mark == 0 {
        return BTreeSet::from([IDLE.to_owned()]);
    }
    let label = by_label.then(|| label_chain(mark));
    names_of(mark).into_iter().chain([NOTRACK.to_owned()]).chain(label).collect()
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
    Ok(in_each_family(|family| {
        let has = found.get(&family);
        with_labels(&LACKS_LABELS, |by_label| {
            if has == Some(&wanted(mark, by_label)) || mark == 0 && has.is_none() {
                return Ok(());
            }
            let delete = has.map(|_| (delete_table(family, TABLE), 0));
            transact(&delete.into_iter().chain(create(family, mark, by_label)).collect::<Vec<_>>())
        })
    }))
}

/// Makes a change with the rules for labels of connections, or without them if the kernel does not support these.
fn with_labels(lacks_labels: &AtomicBool, change: impl Fn(bool) -> io::Result<()>) -> io::Result<()> {
    if lacks_labels.load(Ordering::Relaxed) {
        return change(false);
    }
    match change(true) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            // An error that has another cause comes again.
            change(false)?;
            lacks_labels.store(true, Ordering::Relaxed);
            tracing::info!(
                "the kernel has no labels of connections: rules that set the mark of packets prevent masquerading"
            );
            Ok(())
        }
        result => result,
    }
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

fn create(family: u8, mark: u32, by_label: bool) -> Vec<(Message, u16)> {
    let mut messages = vec![(new_table(family, TABLE), CREATE)];
    if mark == 0 {
        messages.push((base_chain(family, TABLE, (IDLE, POSTROUTING.0, POSTROUTING.1), "nat"), CREATE));
        // The kernel tracks connections only while a rule reads their state.
        messages.push((rule_of(family, TABLE, IDLE, &expressions::ct_state()), APPEND));
    } else {
        messages.extend(chains_in(TABLE, family, mark, by_label));
    }
    messages
}

/// Returns the messages that create the chains with their rules in a table.
fn chains_in(table: &str, family: u8, mark: u32, by_label: bool) -> Vec<(Message, u16)> {
    let [masquerade, invalid] = names_of(mark);
    let chain = |name: &str, hook: (u32, i32), kind| {
        (base_chain(family, table, (name, hook.0, hook.1), kind), CREATE)
    };
    let rule = |name: &str, expressions: &[u8]| (rule_of(family, table, name, expressions), APPEND);
    let [marked_udp, marked] = expressions::masquerade_marked(mark);
    let mut messages = vec![
        chain(&masquerade, POSTROUTING, "nat"),
        rule(&masquerade, &marked_udp),
        rule(&masquerade, &marked),
        chain(&invalid, FORWARD, "filter"),
        rule(&invalid, &expressions::drop_marked_invalid(mark)),
        chain(NOTRACK, BEFORE_CONNTRACK, "filter"),
        rule(NOTRACK, &expressions::notrack_loopback()),
    ];
    if by_label {
        let label = label_chain(mark);
        let [labelled_udp, labelled] = expressions::masquerade_labelled();
        messages.extend([
            chain(&label, AFTER_CONNTRACK, "filter"),
            rule(&label, &expressions::label_marked(mark)),
            rule(&masquerade, &labelled_udp),
            rule(&masquerade, &labelled),
        ]);
    }
    messages
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
        with_labels(&LACKS_LABELS, |by_label| {
            let mut messages = vec![(new_own_table(family, OWN_TABLE), CREATE)];
            messages.extend(chains_in(OWN_TABLE, family, mark, by_label));
            transact_by(&socket, &messages)
        })
    });
    if owned.is_empty() { Err(io::ErrorKind::Unsupported.into()) } else { Ok(socket) }
}

#[cfg(test)]
mod tests {
    use super::super::message::{find, text};
    use super::super::rules::{NEW_CHAIN, NEW_RULE};
    use super::*;

    #[test]
    fn kernel_without_labels_gets_the_other_rules() {
        let lacks_labels = AtomicBool::new(false);
        let refused =
            |code| move |by_label| if by_label { Err(io::Error::from_raw_os_error(code)) } else { Ok(()) };
        assert!(with_labels(&lacks_labels, refused(libc::EPERM)).is_err());
        let never = with_labels(&lacks_labels, |_| Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        assert!(never.is_err() && !lacks_labels.load(Ordering::Relaxed), "the cause is not the labels");
        with_labels(&lacks_labels, refused(libc::EOPNOTSUPP)).unwrap();
        assert!(lacks_labels.load(Ordering::Relaxed));
        with_labels(&lacks_labels, |by_label| {
            assert!(!by_label, "tried again");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn created_chains_are_those_that_are_wanted() {
        for by_label in [false, true] {
            let messages = create(IPV4, 0x4000, by_label);
            // NFTA_CHAIN_NAME, and NFTA_RULE_CHAIN.
            let names = |command, kind| {
                let of = messages.iter().filter(move |(message, _)| message.command() == command);
                of.filter_map(move |(message, _)| find(&message.body, kind).map(text)).collect::<Vec<_>>()
            };
            let (chains, rules) = (names(NEW_CHAIN, 3), names(NEW_RULE, 2));
            assert_eq!(chains.iter().cloned().collect::<BTreeSet<_>>(), wanted(0x4000, by_label));
            assert_eq!(rules.iter().cloned().collect::<BTreeSet<_>>(), wanted(0x4000, by_label));
            let masquerading = rules.iter().filter(|chain| *chain == "masquerade-0x4000").count();
            assert_eq!((masquerading, chains.len()), if by_label { (4, 4) } else { (2, 3) });
        }
        assert_eq!(wanted(0, true), wanted(0, false));
    }

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
