//! Finds chains of netfilter that drop what no rule accepts, and rules that match a Service's address or port, or a client's
//! address.
//!
//! Rules that accept connections by their destination NAT (`ct status dnat`, kube-proxy's chain KUBE-FORWARD) accept nothing of
//! Ballast, whose programs translate before netfilter.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::kube_proxy_rules::{Chain, GET_CHAIN, TABLE, chain_of, family, list};
use super::message::{
    ANY_FAMILY, CHAIN_HOOK, CHAIN_TYPE, HOOK_NUMBER, INET, IPV4, IPV6, Message, NETDEV, NFTABLES, find,
    find_below, text,
};
use super::rules::{Rule, Unconditional, rules};

/// `NFTA_CHAIN_POLICY` (`include/uapi/linux/netfilter/nf_tables.h`).
const POLICY: u16 = 5;
/// `NF_INET_FORWARD`.
const FORWARD: u32 = 2;
/// `NF_INET_LOCAL_IN` and `NF_INET_FORWARD`.
const HOOKS: [u32; 2] = [1, FORWARD];
/// `NF_DROP`.
const DROP: u32 = 0;
/// `NF_INET_PRE_ROUTING`, `NF_NETDEV_INGRESS` and `NF_INET_INGRESS`, each with the families that have it.
const EARLY_HOOKS: [(u32, &[u8]); 2] = [(0, &[INET, IPV4, IPV6, NETDEV]), (5, &[INET])];
/// What the names of all of Ballast's tables begin with.
const OWN: &str = "ballast";
/// The table of firewalld, whose chains have the policy accept and end in a rule that rejects.
const FIREWALLD: &str = "firewalld";
/// How deep chains may jump to each other (`NFT_JUMP_STACK_SIZE`).
const MAX_DEPTH: usize = 16;

/// The rules of each chain, in their order.
type RulesOf<'a> = BTreeMap<&'a Chain, Vec<&'a Rule>>;

/// Returns the chains for packets to this node and through it that drop or reject what no rule accepts, like `FORWARD of ip
/// filter`: by their policy, or by a rule without any match. Chains of iptables are included, those of iptables-legacy are not.
pub fn dropping() -> io::Result<Vec<String>> {
    let chains = list(Message::new(NFTABLES, GET_CHAIN, ANY_FAMILY))?;
    Ok(dropping_in(&chains, &rules()?))
}

fn dropping_in(chains: &[Message], rules: &[Rule]) -> Vec<String> {
    let rules_of = by_chain(rules);
    let found: BTreeSet<_> = chains.iter().filter_map(|chain| of_chain(chain, &rules_of)).collect();
    found.into_iter().collect()
}

fn by_chain(rules: &[Rule]) -> RulesOf<'_> {
    let mut rules_of = RulesOf::new();
    for rule in rules {
        rules_of.entry(&rule.chain).or_default().push(rule);
    }
    rules_of
}

/// Returns whether a packet that no match selects is dropped in the chain; `None`: it leaves the chain at its end.
fn drops_unselected(chain: &Chain, rules_of: &RulesOf<'_>, depth: usize) -> Option<bool> {
    let enter = |name: &String| {
        let next = Chain { name: name.clone(), ..chain.clone() };
        (depth < MAX_DEPTH).then(|| drops_unselected(&next, rules_of, depth + 1)).flatten()
    };
    for rule in rules_of.get(chain).into_iter().flatten() {
        match rule.unconditional.as_ref() {
            None => {}
            Some(Unconditional::Accept) => return Some(false),
            Some(Unconditional::Drop) => return Some(true),
            Some(Unconditional::Return) => return None,
            Some(Unconditional::Goto(target)) => return enter(target),
            Some(Unconditional::Jump(target)) => {
                let decided = enter(target);
                if decided.is_some() {
                    return decided;
                }
            }
        }
    }
    None
}

/// Returns the chains with rules that kube-proxy's connections passed with the Service's address and port, and Ballast's do not:
/// chains before routing from which a rule that drops or rejects is reached, and rules that select packets by the destination
/// before NAT; and chains for forwarded packets from which a rule is reached that drops or rejects by the source address, since
/// Ballast's packets to endpoints on other nodes do not pass them. Rules of verdict maps and of iptables-legacy are not included.
pub fn bypassed() -> io::Result<Vec<String>> {
    let chains = list(Message::new(NFTABLES, GET_CHAIN, ANY_FAMILY))?;
    Ok(bypassed_in(&chains, &rules()?))
}

fn bypassed_in(chains: &[Message], rules: &[Rule]) -> Vec<String> {
    let rules_of = by_chain(rules);
    // Whether a rule that drops is reached; `by_source`: only if it, or a rule that jumps to its chain, selects by the source.
    let drops = |start: &Chain, by_source: bool| {
        let (mut open, mut seen) = (vec![(start.clone(), !by_source)], BTreeSet::new());
        while let Some((chain, is_selected)) = open.pop() {
            for rule in rules_of.get(&chain).into_iter().flatten() {
                let is_selected = is_selected || rule.reads_source;
                if rule.drops && is_selected {
                    return true;
                }
                let targets = rule.targets.iter().map(|name| Chain { name: name.clone(), ..chain.clone() });
                let targets =
                    targets.filter(|chain| !chain.is_kube_proxys()).map(|chain| (chain, is_selected));
                open.extend(targets.filter(|next| seen.insert(next.clone())));
            }
        }
        false
    };
    let early = chains
        .iter()
        .filter_map(before_routing)
        .filter(|(chain, has_policy)| *has_policy || drops(chain, false))
        .map(|(chain, _)| chain);
    let is_forward = |message: &&Message| {
        hook_of(message) == Some(FORWARD) && [INET, IPV4, IPV6].contains(&message.family)
    };
    let forward = chains.iter().filter(is_forward).filter_map(chain_of).filter(|chain| drops(chain, true));
    let original = rules.iter().filter(|rule| rule.reads_original).map(|rule| rule.chain.clone());
    let found: BTreeSet<_> = early.chain(forward).chain(original).collect();
    let is_others =
        |chain: &&Chain| chain.table != TABLE && !chain.table.starts_with(OWN) && !chain.is_kube_proxys();
    let name = |chain: &Chain| format!("{} of {} {}", chain.name, family(chain.family), chain.table);
    found.iter().filter(is_others).map(name).collect()
}

/// Returns the chain if it handles packets before routing and is not for NAT, and whether its policy is drop.
fn before_routing(message: &Message) -> Option<(Chain, bool)> {
    let hook = hook_of(message)?;
    let is_early = EARLY_HOOKS.iter().any(|(early, of)| *early == hook && of.contains(&message.family));
    let is_nat = find(&message.body, CHAIN_TYPE).map(text).as_deref() == Some("nat");
    (is_early && !is_nat).then(|| Some((chain_of(message)?, has_policy_drop(message)))).flatten()
}

/// Returns the number of the hook at which the kernel enters the chain.
fn hook_of(message: &Message) -> Option<u32> {
    find_below(&message.body, &[CHAIN_HOOK, HOOK_NUMBER]).and_then(number)
}

fn has_policy_drop(message: &Message) -> bool {
    find(&message.body, POLICY).and_then(number) == Some(DROP)
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_be_bytes)
}

fn of_chain(message: &Message, rules_of: &RulesOf<'_>) -> Option<String> {
    let chain = chain_of(message)?;
    let hook = hook_of(message)?;
    if !HOOKS.contains(&hook) {
        return None;
    }
    let by_rule = drops_unselected(&chain, rules_of, 0);
    let drops = by_rule.unwrap_or_else(|| has_policy_drop(message)) || chain.table == FIREWALLD;
    drops.then(|| format!("{} of {} {}", chain.name, family(chain.family), chain.table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netfilter::message::{CHAIN_NAME, CHAIN_TABLE};

    fn chain(family: u8, table: &str, name: &str, hook: u32, policy: u32) -> Message {
        let number = Message::new(NFTABLES, GET_CHAIN, family).with(HOOK_NUMBER, &hook.to_be_bytes());
        Message::new(NFTABLES, GET_CHAIN, family)
            .with_text(CHAIN_TABLE, table)
            .with_text(CHAIN_NAME, name)
            .with(CHAIN_HOOK, &number.body)
            .with(POLICY, &policy.to_be_bytes())
    }

    #[test]
    fn chains_with_policy_drop_and_those_of_firewalld_are_found() {
        let found = |chain: Message| of_chain(&chain, &RulesOf::new());
        assert_eq!(found(chain(IPV4, "filter", "FORWARD", 2, 0)).as_deref(), Some("FORWARD of ip filter"));
        assert_eq!(found(chain(IPV4, "filter", "FORWARD", 2, 1)), None);
        assert_eq!(found(chain(IPV4, "filter", "OUTPUT", 3, 0)), None);
        let firewalld = chain(INET, "firewalld", "filter_INPUT", 1, 1);
        assert_eq!(found(firewalld).as_deref(), Some("filter_INPUT of inet firewalld"));
        let regular = Message::new(NFTABLES, GET_CHAIN, IPV4).with_text(CHAIN_TABLE, "filter");
        assert_eq!(found(regular.with_text(CHAIN_NAME, "DOCKER")), None);
    }

    #[test]
    fn chains_that_end_in_a_drop_without_a_match_are_found() {
        let chains = [chain(IPV4, "filter", "FORWARD", 2, 1), chain(IPV4, "filter", "OUTPUT", 3, 1)];
        let found = |rules: &[Rule]| dropping_in(&chains, rules);
        let does = |chain, what: Unconditional| Rule { unconditional: Some(what), ..rule("filter", chain) };
        let drop = |chain| Rule { drops: true, ..does(chain, Unconditional::Drop) };
        let selective_drop = Rule { drops: true, ..rule("filter", "FORWARD") };
        let jump = |from, to: &str| does(from, Unconditional::Jump(to.to_owned()));
        let goto = |from, to: &str| does(from, Unconditional::Goto(to.to_owned()));
        let accept = |chain| does(chain, Unconditional::Accept);
        let leave = |chain| does(chain, Unconditional::Return);
        for rules in [
            &[drop("FORWARD")][..],
            &[rule("filter", "FORWARD"), drop("FORWARD")],
            &[jump("FORWARD", "A"), jump("A", "B"), drop("B")],
            &[jump("FORWARD", "A"), leave("A"), drop("A"), drop("FORWARD")],
            &[goto("FORWARD", "A"), accept("FORWARD"), drop("A")],
        ] {
            assert_eq!(found(rules), ["FORWARD of ip filter"], "{rules:?}");
        }
        for rules in [
            &[][..],
            &[selective_drop],
            &[drop("OUTPUT")],
            &[drop("A")],
            &[accept("FORWARD"), drop("FORWARD")],
            &[jump("FORWARD", "A"), accept("A"), drop("FORWARD")],
            &[goto("FORWARD", "A"), leave("A"), drop("FORWARD")],
            &[jump("FORWARD", "A"), jump("A", "A")],
        ] {
            assert_eq!(found(rules), [""; 0], "{rules:?}");
        }
        let policy = [chain(IPV4, "filter", "INPUT", 1, 0)];
        assert_eq!(dropping_in(&policy, &[accept("INPUT")]), [""; 0], "the policy is never reached");
    }

    fn rule(table: &str, chain: &str) -> Rule {
        Rule {
            chain: Chain { family: IPV4, table: table.to_owned(), name: chain.to_owned() },
            ..Rule::default()
        }
    }

    #[test]
    fn chains_before_routing_that_reach_a_drop_are_found() {
        let chains = [chain(IPV4, "raw", "PREROUTING", 0, 1), chain(IPV4, "filter", "FORWARD", 2, 1)];
        let jump =
            |target: &str| Rule { targets: BTreeSet::from([target.to_owned()]), ..rule("raw", "PREROUTING") };
        let drop = |table, chain| Rule { drops: true, ..rule(table, chain) };
        let found = |rules: &[Rule]| bypassed_in(&chains, rules);
        assert_eq!(found(&[jump("BLOCK"), drop("raw", "BLOCK")]), ["PREROUTING of ip raw"]);
        assert_eq!(found(&[jump("BLOCK"), drop("raw", "OTHER"), drop("filter", "FORWARD")]), [""; 0]);
        assert_eq!(found(&[jump("KUBE-SERVICES"), drop("raw", "KUBE-SERVICES")]), [""; 0]);
        let nat = chain(IPV4, "nat", "PREROUTING", 0, 1).with_text(CHAIN_TYPE, "nat");
        let others = [
            nat,
            chain(IPV4, TABLE, "filter-prerouting", 0, 1),
            chain(IPV4, "ballast-handover", "prerouting", 0, 1),
            chain(NETDEV, "filter", "egress", 1, 0),
            chain(NETDEV, "filter", "ingress", 0, 0),
        ];
        let rules = [
            drop("nat", "PREROUTING"),
            drop(TABLE, "filter-prerouting"),
            drop("ballast-handover", "prerouting"),
        ];
        assert_eq!(bypassed_in(&others, &rules), ["ingress of netdev filter"]);
    }

    #[test]
    fn forward_chains_that_drop_by_source_are_found() {
        let chains = [
            chain(IPV4, "filter", "FORWARD", 2, 1),
            chain(IPV4, "filter", "INPUT", 1, 1),
            chain(NETDEV, "filter", "other", 2, 1),
        ];
        let found = |rules: &[Rule]| bypassed_in(&chains, rules);
        let jump = |reads_source| Rule {
            targets: BTreeSet::from(["BAN".to_owned()]),
            reads_source,
            ..rule("filter", "FORWARD")
        };
        let drop = |chain, reads_source| Rule { drops: true, reads_source, ..rule("filter", chain) };
        for rules in [
            &[drop("FORWARD", true)][..],
            &[jump(false), drop("BAN", true)],
            &[jump(true), drop("BAN", false)],
            &[jump(false), jump(true), drop("BAN", false)],
        ] {
            assert_eq!(found(rules), ["FORWARD of ip filter"], "{rules:?}");
        }
        let accept = Rule { reads_source: true, ..rule("filter", "FORWARD") };
        let others = [drop("FORWARD", false), accept, drop("INPUT", true), drop("other", true)];
        assert_eq!(found(&others), [""; 0]);
    }

    #[test]
    fn rules_by_the_destination_before_nat_are_found_in_every_chain() {
        let rules = ["ufw-user-forward", "KUBE-FORWARD"]
            .map(|chain| Rule { reads_original: true, ..rule("filter", chain) });
        assert_eq!(bypassed_in(&[], &rules), ["ufw-user-forward of ip filter"]);
    }
}
