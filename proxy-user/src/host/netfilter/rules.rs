//! Removes kube-proxy's rules in one transaction, and keeps its connections alive.
//!
//! A translated connection continues by its conntrack entry, without any rule. But the kernel applies these entries
//! only while a chain of type `nat` exists, and tracks connections only while a rule reads their state. So a table of
//! Ballast gets chains of that type, with one rule that reads the state and decides nothing.

use std::collections::BTreeSet;
use std::io;

use super::expressions::{self, EXPRESSION_NAME};
use super::kube_proxy_rules::{Chain, TABLE, TAKEOVER_TABLE, chains, family, is_kube_proxys, list};
use super::message::{
    ANY_FAMILY, CHAIN_HOOK, CHAIN_NAME, CHAIN_TABLE, CHAIN_TYPE, HOOK_NUMBER, IPV4, IPV6, Message, NESTED,
    NFTABLES, attributes, find, find_below, nested, text, transact,
};
use proxy_core::model::plural::plural;

const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DEL_TABLE: u16 = 2;
pub(super) const NEW_CHAIN: u16 = 3;
const DEL_CHAIN: u16 = 5;
pub(super) const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;
const DEL_RULE: u16 = 8;
/// `NLM_F_CREATE`, and the same with `NLM_F_APPEND`.
pub(super) const CREATE: u16 = 0x400;
pub(super) const APPEND: u16 = 0xc00;

/// `NFTA_TABLE_NAME`.
const TABLE_NAME: u16 = 1;
/// `NFTA_TABLE_FLAGS`, `NFT_TABLE_F_OWNER`: only the socket that created the table can change it, `nft flush ruleset` leaves
/// it, and the kernel removes it when the socket is closed.
const TABLE_FLAGS: u16 = 2;
const OWNER: u32 = 2;
/// `NFTA_TABLE_OWNER`.
pub(super) const TABLE_OWNER: u16 = 7;
/// `NFTA_HOOK_PRIORITY`.
const HOOK_PRIORITY: u16 = 2;
/// `NFTA_RULE_TABLE`, `_CHAIN`, `_HANDLE`, `_EXPRESSIONS`.
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
/// The path from an expression to the chain of an `immediate` verdict: `NFTA_EXPR_DATA`, `NFTA_IMMEDIATE_DATA`,
/// `NFTA_DATA_VERDICT`, `NFTA_VERDICT_CHAIN`.
const TARGET: [u16; 4] = [2, 2, 2, 2];
/// The path to the code of the verdict (`NFTA_VERDICT_CODE`), and the code `NF_DROP`.
const CODE: [u16; 4] = [2, 2, 2, 1];
const DROP: [u8; 4] = [0; 4];
/// The codes `NF_ACCEPT`, `NFT_JUMP`, `NFT_GOTO`, `NFT_RETURN`.
const ACCEPT: [u8; 4] = 1i32.to_be_bytes();
const JUMP: [u8; 4] = (-3i32).to_be_bytes();
const GOTO: [u8; 4] = (-4i32).to_be_bytes();
const RETURN: [u8; 4] = (-5i32).to_be_bytes();
/// Expressions that select no packets. iptables calls the comment of a rule a match, and every target but its verdicts a `target`.
const UNSELECTIVE: [&str; 6] = ["counter", "immediate", "log", "notrack", "reject", "target"];
/// The path to the name of a target of iptables (`NFTA_TARGET_NAME`).
const TARGET_NAME: [u16; 2] = [2, 1];
/// The paths from an expression to the key and the direction of `ct` (`NFTA_CT_KEY`, `NFTA_CT_DIRECTION`), and to the name and the
/// data of a match of iptables (`NFTA_MATCH_NAME`, `_INFO`).
const CT_KEY: [u16; 2] = [2, 2];
const CT_DIRECTION: [u16; 2] = [2, 3];
const MATCH_NAME: [u16; 2] = [2, 1];
const MATCH_INFO: [u16; 2] = [2, 3];
/// The paths to the header, the offset and the length of `payload` (`NFTA_PAYLOAD_BASE`, `_OFFSET`, `_LEN`), and
/// `NFT_PAYLOAD_NETWORK_HEADER`.
const PAYLOAD_BASE: [u16; 2] = [2, 2];
const PAYLOAD_OFFSET: [u16; 2] = [2, 3];
const PAYLOAD_LENGTH: [u16; 2] = [2, 4];
const NETWORK_HEADER: u32 = 1;
/// Matches of iptables that usually look at the source address.
const SOURCE_MATCHES: [&str; 6] = ["set", "iprange", "geoip", "recent", "hashlimit", "connlimit"];
/// The keys of `ct` for the destination of a connection: `NFT_CT_DST`, `_PROTO_DST`, `_DST_IP`, `_DST_IP6`.
const CT_DESTINATIONS: [u32; 4] = [9, 12, 20, 22];
/// `match_flags` of `xt_conntrack_mtinfo3`, and its bits `XT_CONNTRACK_ORIGDST` and `_ORIGDST_PORT`.
const MATCH_FLAGS: std::ops::Range<usize> = 146..148;
const ORIGINAL_DESTINATION: u16 = 1 << 3 | 1 << 9;

/// Hooks of type `nat`, with their usual priorities.
const NAT_HOOKS: [(&str, u32, i32); 4] =
    [("prerouting", 0, -100), ("input", 1, 100), ("output", 3, -100), ("postrouting", 4, 100)];

/// What a rule without any match does with every packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unconditional {
    Accept,
    /// Drops or rejects it.
    Drop,
    /// Continues in this chain, and then behind the rule.
    Jump(String),
    /// Continues in this chain, and then where this rule's chain returns.
    Goto(String),
    Return,
}

/// A rule of nftables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rule {
    pub chain: Chain,
    pub handle: Vec<u8>,
    /// The chains that it jumps to.
    pub targets: BTreeSet<String>,
    /// It drops or rejects packets, and does not select them by the way back to their source (`fib`, `rpfilter`).
    pub drops: bool,
    /// It selects packets by their source address: a comparison, a set of addresses, or a list or limit of iptables.
    pub reads_source: bool,
    /// It selects packets by the destination that their connection had before NAT (`ct original`, `--ctorigdstport`).
    pub reads_original: bool,
    /// What it does with every packet; `None`: it selects packets, or decides nothing.
    pub unconditional: Option<Unconditional>,
}

/// The result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// A description of what is removed, one for each table.
    pub removed: Vec<String>,
    /// Chains to which rules of other programs jump; they stay.
    pub left: Vec<String>,
}

/// Removes every rule, chain and table of kube-proxy in nftables, also those made by iptables, and creates the empty
/// chains, all in one transaction. With `only_say`, nothing is changed.
pub fn remove(only_say: bool) -> io::Result<Removal> {
    let (changes, removal) = plan(&chains()?, &rules()?);
    if !only_say && !changes.is_empty() {
        transact(&changes)?;
    }
    Ok(removal)
}

/// Removes the empty chains; returns whether they existed.
pub fn finish() -> io::Result<bool> {
    let tables: BTreeSet<_> = chains()?
        .into_iter()
        .filter(|chain| chain.table == TAKEOVER_TABLE)
        .map(|chain| chain.family)
        .collect();
    let changes: Vec<_> = tables.iter().map(|family| (delete_table(*family, TAKEOVER_TABLE), 0)).collect();
    if changes.is_empty() {
        return Ok(false);
    }
    transact(&changes).map(|()| true)
}

fn plan(chains: &[Chain], rules: &[Rule]) -> (Vec<(Message, u16)>, Removal) {
    let (mut changes, mut removal) = (Vec::new(), Removal::default());
    let own: BTreeSet<&Chain> =
        chains.iter().filter(|chain| chain.is_kube_proxys() && chain.table != TABLE).collect();
    let is_own = |chain: &Chain| own.contains(chain);
    let leads_to_own = |rule: &&Rule| rule.targets.iter().any(|target| is_kube_proxys(target));
    // Rules in the chains that the kernel enters are kube-proxy's; rules in other chains belong to programs that use its chains.
    let (entries, others): (Vec<_>, Vec<_>) = rules
        .iter()
        .filter(|rule| rule.chain.table != TABLE && !is_own(&rule.chain))
        .filter(leads_to_own)
        .partition(|rule| is_entry(&rule.chain.name));
    let mut kept: BTreeSet<Chain> = BTreeSet::new();
    let mut leading: Vec<&Rule> = others;
    while let Some(rule) = leading.pop() {
        for target in rule.targets.iter().filter(|target| is_kube_proxys(target)) {
            let chain = Chain { name: target.clone(), ..rule.chain.clone() };
            if own.contains(&chain) && kept.insert(chain.clone()) {
                leading.extend(rules.iter().filter(|rule| rule.chain == chain));
            }
        }
    }
    for rule in entries {
        let message = Message::new(NFTABLES, DEL_RULE, rule.chain.family)
            .with_text(RULE_TABLE, &rule.chain.table)
            .with_text(RULE_CHAIN, &rule.chain.name)
            .with(RULE_HANDLE, &rule.handle);
        changes.push((message, 0));
    }
    let gone: Vec<&Chain> = own.into_iter().filter(|chain| !kept.contains(*chain)).collect();
    // The rules of all chains are deleted first, because chains jump to each other.
    for chain in &gone {
        let all = Message::new(NFTABLES, DEL_RULE, chain.family)
            .with_text(RULE_TABLE, &chain.table)
            .with_text(RULE_CHAIN, &chain.name);
        changes.push((all, 0));
    }
    for chain in &gone {
        let message = Message::new(NFTABLES, DEL_CHAIN, chain.family)
            .with_text(CHAIN_TABLE, &chain.table)
            .with_text(CHAIN_NAME, &chain.name);
        changes.push((message, 0));
    }
    let tables: BTreeSet<_> =
        chains.iter().filter(|chain| chain.table == TABLE).map(|chain| chain.family).collect();
    changes.extend(tables.iter().map(|family| (delete_table(*family, TABLE), 0)));
    removal.removed = tables.iter().map(|one| format!("table {} {TABLE}", family(*one))).collect();
    let mut shared = std::collections::BTreeMap::<(u8, &str), usize>::new();
    for chain in &gone {
        *shared.entry((chain.family, &chain.table)).or_default() += 1;
    }
    let say = |((number, table), count): ((u8, &str), usize)| {
        format!("{} in {} {table}", plural(count, "chain"), family(number))
    };
    removal.removed.extend(shared.into_iter().map(say));
    removal.left =
        kept.iter().map(|chain| format!("{} {} {}", family(chain.family), chain.table, chain.name)).collect();
    if !changes.is_empty() {
        // Before all other changes, so that a chain of type nat exists at every moment.
        changes.splice(0..0, keep_alive());
    }
    (changes, removal)
}

/// Whether the kernel itself enters the chain, in the tables of iptables.
fn is_entry(chain: &str) -> bool {
    ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"].contains(&chain)
}

pub(super) fn new_table(family: u8, table: &str) -> Message {
    Message::new(NFTABLES, NEW_TABLE, family).with_text(TABLE_NAME, table)
}

/// Returns the message that creates a table of the socket that sends it.
pub(super) fn new_own_table(family: u8, table: &str) -> Message {
    new_table(family, table).with(TABLE_FLAGS, &OWNER.to_be_bytes())
}

pub(super) fn get_table(family: u8, table: &str) -> Message {
    Message::new(NFTABLES, GET_TABLE, family).with_text(TABLE_NAME, table)
}

pub(super) fn delete_table(family: u8, table: &str) -> Message {
    Message::new(NFTABLES, DEL_TABLE, family).with_text(TABLE_NAME, table)
}

/// Returns the messages that create the empty chains, for both families.
fn keep_alive() -> Vec<(Message, u16)> {
    let mut changes = Vec::new();
    for family in [IPV4, IPV6] {
        changes.push((new_table(family, TAKEOVER_TABLE), CREATE));
        for hook in NAT_HOOKS {
            changes.push((base_chain(family, TAKEOVER_TABLE, hook, "nat"), CREATE));
        }
        // The rule does not use the state that it reads.
        changes.push((rule_of(family, TAKEOVER_TABLE, NAT_HOOKS[0].0, &expressions::ct_state()), APPEND));
    }
    changes
}

/// Returns the message that creates a base chain: name, number and priority of its hook, and its type.
pub(super) fn base_chain(
    family: u8,
    table: &str,
    (name, number, priority): (&str, u32, i32),
    kind: &str,
) -> Message {
    let hook = nested(&[(HOOK_NUMBER, &number.to_be_bytes()), (HOOK_PRIORITY, &priority.to_be_bytes())]);
    Message::new(NFTABLES, NEW_CHAIN, family)
        .with_text(CHAIN_TABLE, table)
        .with_text(CHAIN_NAME, name)
        .with(CHAIN_HOOK | NESTED, &hook)
        .with_text(CHAIN_TYPE, kind)
}

/// Returns the message that creates a rule of these expressions.
pub(super) fn rule_of(family: u8, table: &str, chain: &str, expressions: &[u8]) -> Message {
    Message::new(NFTABLES, NEW_RULE, family)
        .with_text(RULE_TABLE, table)
        .with_text(RULE_CHAIN, chain)
        .with(RULE_EXPRESSIONS | NESTED, expressions)
}

pub(super) fn rules() -> io::Result<Vec<Rule>> {
    let answers = list(Message::new(NFTABLES, GET_RULE, ANY_FAMILY))?;
    Ok(answers.iter().filter_map(rule).collect())
}

fn rule(message: &Message) -> Option<Rule> {
    let name = |kind| find(&message.body, kind).map(text);
    let expressions = find(&message.body, RULE_EXPRESSIONS).unwrap_or_default();
    let expressions: Vec<_> = attributes(expressions).map(|(_, expression)| expression).collect();
    let is = |expression: &[u8], name| find(expression, EXPRESSION_NAME).map(text).as_deref() == Some(name);
    let matches = |one: &[u8], name| {
        is(one, "match") && find_below(one, &MATCH_NAME).map(text).as_deref() == Some(name)
    };
    let target = |expression: &&[u8]| {
        is(expression, "immediate").then(|| find_below(expression, &TARGET).map(text)).flatten()
    };
    let code = |one: &[u8]| {
        let code = is(one, "immediate").then(|| find_below(one, &CODE)).flatten();
        code.and_then(|code| <[u8; 4]>::try_from(code).ok())
    };
    let rejects = |one: &[u8]| {
        let target = || find_below(one, &TARGET_NAME).map(text);
        is(one, "reject") || is(one, "target") && target().as_deref() == Some("REJECT")
    };
    let drops = |one: &&[u8]| rejects(one) || code(one) == Some(DROP);
    let selects = |one: &&[u8]| !UNSELECTIVE.iter().any(|name| is(one, name)) && !matches(one, "comment");
    let decides = |one: &&[u8]| match code(one) {
        _ if drops(one) => Some(Unconditional::Drop),
        Some(ACCEPT) => Some(Unconditional::Accept),
        Some(JUMP) => target(one).map(Unconditional::Jump),
        Some(GOTO) => target(one).map(Unconditional::Goto),
        Some(RETURN) => Some(Unconditional::Return),
        _ => None,
    };
    let reads_original = |one: &&[u8]| {
        let key = find_below(one, &CT_KEY).and_then(|key| Some(u32::from_be_bytes(key.try_into().ok()?)));
        let flags = || {
            let flags = find_below(one, &MATCH_INFO)?.get(MATCH_FLAGS)?.try_into().ok()?;
            Some(u16::from_ne_bytes(flags) & ORIGINAL_DESTINATION != 0)
        };
        // Direction 0 is that of the connection's first packet.
        is(one, "ct")
            && key.is_some_and(|key| CT_DESTINATIONS.contains(&key))
            && find_below(one, &CT_DIRECTION) == Some(&[0])
            || matches(one, "conntrack") && flags() == Some(true)
    };
    let reads_source = |one: &&[u8]| {
        let number = |path| Some(u32::from_be_bytes(find_below(one, path)?.try_into().ok()?));
        // A prefix of whole bytes loads only these, and one load may have both addresses. At 8, IPv4 has the TTL, which is one byte.
        let loads = || match (number(&PAYLOAD_OFFSET)?, number(&PAYLOAD_LENGTH)?) {
            (12, _) => Some(true),
            (offset, length) => Some(offset == 8 && length > 1),
        };
        is(one, "payload") && number(&PAYLOAD_BASE) == Some(NETWORK_HEADER) && loads() == Some(true)
            || SOURCE_MATCHES.iter().any(|name| matches(one, name))
    };
    Some(Rule {
        chain: Chain { family: message.family, table: name(RULE_TABLE)?, name: name(RULE_CHAIN)? },
        handle: find(&message.body, RULE_HANDLE)?.to_vec(),
        targets: expressions.iter().filter_map(target).collect(),
        drops: expressions.iter().any(drops)
            && !expressions.iter().any(|one| is(one, "fib") || matches(one, "rpfilter")),
        reads_source: expressions.iter().any(reads_source),
        reads_original: expressions.iter().any(reads_original),
        unconditional: if expressions.iter().any(selects) {
            None
        } else {
            expressions.iter().find_map(decides)
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::message::INET;
    use super::*;

    fn chain(table: &str, name: &str) -> Chain {
        Chain { family: IPV4, table: table.to_owned(), name: name.to_owned() }
    }

    fn leads(from: Chain, to: &str) -> Rule {
        Rule {
            chain: from,
            handle: vec![0, 0, 0, 0, 0, 0, 0, 1],
            targets: BTreeSet::from([to.to_owned()]),
            ..Rule::default()
        }
    }

    #[test]
    fn rule_is_read_with_its_verdict_and_its_matches() {
        let of = |expressions: &[u8]| {
            let message = rule_of(IPV4, "raw", "PREROUTING", expressions).with(RULE_HANDLE, &[0; 8]);
            let rule = rule(&message).unwrap();
            (rule.drops, rule.reads_original)
        };
        let expression = expressions::expression;
        let drop = expressions::drop_unknown_tcp();
        assert_eq!(of(&drop), (true, false));
        assert_eq!(of(&expression("reject", &[(1, &[0; 4])])), (true, false));
        assert_eq!(
            of(&[expression("fib", &[(1, &[0; 4])]), drop].concat()),
            (false, false),
            "a reverse path filter"
        );
        assert_eq!(of(&expressions::ct_state()), (false, false));
        let port = |direction: u8| expression("ct", &[(2, &12u32.to_be_bytes()), (3, &[direction])]);
        assert_eq!((of(&port(0)), of(&port(1))), ((false, true), (false, false)));
        let conntrack = |flags: u16| {
            let mut info = [0; 160];
            info[MATCH_FLAGS].copy_from_slice(&flags.to_ne_bytes());
            expression("match", &[(1, b"conntrack\0"), (3, &info)])
        };
        assert_eq!((of(&conntrack(1 << 9)), of(&conntrack(1 << 11))), ((false, true), (false, false)));
    }

    #[test]
    fn rule_without_a_match_is_known_by_what_it_decides() {
        let of = |expressions: &[u8]| {
            let message = rule_of(IPV4, "filter", "FORWARD", expressions).with(RULE_HANDLE, &[0; 8]);
            rule(&message).unwrap().unconditional
        };
        let (expression, verdict) = (expressions::expression, expressions::verdict);
        let counter = expression("counter", &[]);
        let to = |code: &[u8]| verdict(&[(1, code), (2, b"other\0")]);
        for (code, wanted) in [
            (DROP, Some(Unconditional::Drop)),
            (ACCEPT, Some(Unconditional::Accept)),
            (JUMP, Some(Unconditional::Jump("other".to_owned()))),
            (GOTO, Some(Unconditional::Goto("other".to_owned()))),
            (RETURN, Some(Unconditional::Return)),
            // NFT_CONTINUE.
            ((-1i32).to_be_bytes(), None),
        ] {
            assert_eq!(of(&[counter.clone(), to(&code)].concat()), wanted, "{code:?}");
        }
        let target = |name: &[u8]| expression("target", &[(1, name)]);
        let comment = expression("match", &[(1, b"comment\0"), (3, &[0; 8])]);
        assert_eq!(of(&[comment, counter.clone(), target(b"REJECT\0")].concat()), Some(Unconditional::Drop));
        assert_eq!(of(&expression("reject", &[(1, &[0; 4])])), Some(Unconditional::Drop));
        assert_eq!(of(&[counter, target(b"LOG\0")].concat()), None);
        assert_eq!(of(&expressions::drop_unknown_tcp()), None, "it selects TCP");
        let limit = expression("match", &[(1, b"limit\0"), (3, &[0; 8])]);
        assert_eq!(of(&[limit, to(&DROP)].concat()), None);
    }

    #[test]
    fn rule_by_the_source_is_known_by_its_load_or_its_match() {
        let of = |expressions: &[u8]| {
            let message = rule_of(INET, "filter", "forward", expressions).with(RULE_HANDLE, &[0; 8]);
            rule(&message).unwrap().reads_source
        };
        let load = |base: u32, offset: u32, length: u32| {
            let [base, offset, length] = [base, offset, length].map(u32::to_be_bytes);
            expressions::expression("payload", &[(1, &[0; 4]), (2, &base), (3, &offset), (4, &length)])
        };
        assert!(
            of(&load(1, 12, 4))
                && of(&load(1, 12, 3))
                && of(&load(1, 12, 8))
                && of(&load(1, 8, 16))
                && of(&load(1, 8, 8))
        );
        for (what, base, offset, length) in
            [("destination", 1, 16, 4), ("IPv6 destination", 1, 24, 16), ("TTL", 1, 8, 1), ("TCP", 2, 12, 1)]
        {
            assert!(!of(&load(base, offset, length)), "{what}");
        }
        let matched = |name: &[u8]| expressions::expression("match", &[(1, name), (3, &[0; 8])]);
        assert!(of(&matched(b"set\0")) && !of(&matched(b"comment\0")));
    }

    #[test]
    fn chains_that_others_use_stay_and_the_other_chains_are_deleted() {
        let chains =
            ["PREROUTING", "KUBE-SERVICES", "KUBE-SVC-A", "KUBE-MARK-MASQ", "HOSTPORTS", "KUBE-FIREWALL"]
                .map(|name| chain("nat", name));
        let [entry, services, svc, mark, theirs, _] = chains.clone();
        let rules = [
            leads(entry.clone(), "KUBE-SERVICES"),
            leads(entry, "HOSTPORTS"),
            leads(services, "KUBE-SVC-A"),
            leads(svc, "KUBE-MARK-MASQ"),
            leads(theirs, "KUBE-MARK-MASQ"),
        ];
        let (changes, removal) = plan(&chains, &rules);
        assert_eq!(removal.removed, ["2 chains in ip nat"]);
        assert_eq!(removal.left, ["ip nat KUBE-MARK-MASQ"]);
        assert_eq!(mark.name, "KUBE-MARK-MASQ");
        let count = |command| changes.iter().filter(|(message, _)| message.command() == command).count();
        // One rule that jumps to kube-proxy's chains, and all rules of two chains.
        assert_eq!((count(DEL_RULE), count(DEL_CHAIN), count(DEL_TABLE)), (3, 2, 0));
        assert_eq!((count(NEW_TABLE), count(NEW_CHAIN), count(NEW_RULE)), (2, 8, 2));
    }

    #[test]
    fn kube_proxys_own_table_is_deleted_as_a_whole() {
        let (changes, removal) = plan(&[chain(TABLE, "services")], &[]);
        assert_eq!(removal.removed, ["table ip kube-proxy"]);
        assert_eq!(changes.last().map(|(message, _)| message.command()), Some(DEL_TABLE));
        let (changes, removal) = plan(&[chain("nat", "PREROUTING")], &[]);
        assert!(changes.is_empty() && removal == Removal::default());
    }
}
