//! Checks that dependencies between the modules of `proxy-user` go one way, and that in `proxy-ebpf` only the entry points use the
//! kernel's implementation.
//!
//! The compiler checks this between crates, and not inside one; the tables here do. A new module needs a line, which decides
//! its layer.

use super::paths::Unit;
use super::source::Finding;

/// The modules of `proxy-user`, and which of them each may use.
const MODULES: [(&str, &str); 19] = [
    ("otlp", ""),
    ("maps", ""),
    ("rates", "maps"),
    ("driver", ""),
    ("audit", "maps driver"),
    ("host", ""),
    ("programs", "host maps"),
    ("sockets", "host maps programs driver"),
    ("connections", "maps programs sockets driver"),
    ("metrics", "audit maps otlp programs driver"),
    ("page", "cli config maps rates"),
    ("http", "metrics page driver"),
    ("config", "host otlp programs"),
    ("cli", "config host maps otlp programs"),
    ("gate", "cli http"),
    ("telemetry", "config otlp"),
    ("top", "cli config maps rates"),
    (
        "app",
        "audit cli config connections host http maps metrics otlp page programs sockets driver telemetry",
    ),
    ("main", "app cli config gate host otlp programs telemetry top"),
];

/// Crates that only some modules may use, so that the others stay testable without them.
const RESTRICTED: [(&str, &str); 15] = [
    ("anyhow", "app main"),
    ("aya", "maps programs"),
    ("aya_log", "programs"),
    ("aya_obj", "maps programs"),
    ("axum", "gate http"),
    ("clap", "cli config main"),
    ("hyper", "http otlp"),
    ("k8s_openapi", "gate"),
    ("kube", "app gate otlp"),
    ("netlink_packet_sock_diag", "host"),
    ("proxy_cli", "app cli config http main page telemetry top"),
    ("proxy_watch", "app audit"),
    ("ratatui", "top"),
    ("rtnetlink", "host programs"),
    ("tokio", "app audit connections gate host http main metrics otlp page programs sockets driver"),
];

/// The modules of `proxy-ebpf` that know the kernel; all others also run on the host.
const KERNEL: [&str; 2] = ["kernel", "main"];

/// Checks the modules and crates that a file uses.
pub(super) fn modules(unit: &Unit<'_>) -> Vec<Finding> {
    match unit.package {
        "proxy-ebpf" => kernel_uses(unit),
        "proxy-user" => agent_uses(unit),
        _ => Vec::new(),
    }
}

/// Checks that a file of `proxy-ebpf` outside of [`KERNEL`] uses neither the module `kernel` nor aya.
fn kernel_uses(unit: &Unit<'_>) -> Vec<Finding> {
    let Some(top) = unit.module.first().filter(|top| !KERNEL.contains(&top.as_str())) else {
        return Vec::new();
    };
    let is_kernels = |path: &[String]| path.first().is_some_and(|name| name == "kernel");
    let uses = unit.used.iter().filter(|used| match used.absolute(&unit.module, "proxy_ebpf") {
        Some(path) => is_kernels(&path),
        None => used.names[0] == "aya_ebpf",
    });
    let find = |line| Finding {
        file: unit.path.to_owned(),
        line,
        what: format!("`{top}` may not use `kernel` or the crate aya_ebpf"),
    };
    uses.map(|used| find(used.line)).collect()
}

fn agent_uses(unit: &Unit<'_>) -> Vec<Finding> {
    let Some(top) = unit.module.first() else { return Vec::new() };
    let find = |line, what| Finding { file: unit.path.to_owned(), line, what };
    let Some((_, allowed)) = MODULES.iter().find(|(name, _)| name == top) else {
        return vec![find(0, format!("module `{top}` has no line in the table of layers"))];
    };
    let mut findings = Vec::new();
    for used in &unit.used {
        if let Some(path) = used.absolute(&unit.module, "proxy_user") {
            let Some(name) = path.first().filter(|name| *name != top) else { continue };
            let known = MODULES.iter().any(|(module, _)| module == name);
            if known && !has(allowed, name) {
                findings.push(find(used.line, format!("`{top}` may not use `{name}`")));
            }
        } else {
            let name = &used.names[0];
            let rule = RESTRICTED.iter().find(|(krate, _)| krate == name);
            if rule.is_some_and(|(_, modules)| !has(modules, top)) {
                findings.push(find(used.line, format!("`{top}` may not use the crate {name}")));
            }
        }
    }
    // A `use` group may name a module twice.
    findings.dedup();
    findings
}

/// Whether a list of words has the word.
fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|one| one == word)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::lint::source::SourceFile;

    fn whats(path: &str, text: &str) -> Vec<String> {
        let file = SourceFile { path: path.into(), text: text.into() };
        let unit = Unit::read(&file).unwrap();
        unit.iter().flat_map(modules).map(|finding| format!("{} {}", finding.line, finding.what)).collect()
    }

    #[test]
    fn a_use_against_the_direction_is_found_in_every_form() {
        for (file, text, found) in [
            ("rates/mod.rs", "\nuse crate::driver::Driver;\n", "2 `rates` may not use `driver`"),
            ("maps/a.rs", "fn f() { crate::driver::go() }", "1 `maps` may not use `driver`"),
            (
                "rates/a.rs",
                "use crate::{\n driver::{self, Driver},\n maps::View,\n};",
                "2 `rates` may not use `driver`",
            ),
            ("maps/mod.rs", "use super::rates::X;", "1 `maps` may not use `rates`"),
            ("maps/a.rs", "use super::super::rates::X;", "1 `maps` may not use `rates`"),
            ("driver/a.rs", "use aya::Ebpf;", "1 `driver` may not use the crate aya"),
            ("maps/a.rs", "type A = kube::Client;", "1 `maps` may not use the crate kube"),
            ("novel.rs", "", "0 module `novel` has no line in the table of layers"),
        ] {
            assert_eq!(whats(&format!("proxy-user/src/{file}"), text), [found]);
        }
    }

    #[test]
    fn what_is_in_the_table_and_comments_tests_and_other_crates_are_free() {
        for (file, text) in [
            ("proxy-user/src/rates/mod.rs", "use crate::maps::View;\nuse crate::rates::Rate;\n"),
            // `super` in maps/a.rs is `maps` itself, which may have a module `rates` of its own.
            ("proxy-user/src/maps/a.rs", "use super::rates::X;"),
            ("proxy-user/src/programs/a.rs", "use aya::Ebpf;"),
            ("proxy-user/src/driver/a.rs", "use self::aya::Ebpf;"),
            ("proxy-user/src/maps/a.rs", "// use crate::driver::X;\n"),
            ("proxy-user/src/maps/tests.rs", "use crate::driver::X;\n"),
            ("proxy-common/src/a.rs", "use crate::driver::X;\n"),
        ] {
            assert!(whats(file, text).is_empty(), "{file}: {text}");
        }
    }

    #[test]
    fn use_of_the_kernel_below_it_is_found() {
        for text in ["use crate::kernel::maps::X;", "fn f() { aya_ebpf::helpers::x() }"] {
            let found = "1 `socket` may not use `kernel` or the crate aya_ebpf";
            assert_eq!(whats("proxy-ebpf/src/socket/a.rs", text), [found]);
            assert!(whats("proxy-ebpf/src/kernel/a.rs", text).is_empty());
        }
    }

    #[test]
    fn the_table_has_no_cycle() {
        fn reaches(table: &BTreeMap<&str, &str>, from: &str, to: &str) -> bool {
            table[from].split_whitespace().any(|next| next == to || reaches(table, next, to))
        }
        let table = BTreeMap::from(MODULES);
        for name in table.keys() {
            assert!(!reaches(&table, name, name), "{name} reaches itself");
        }
    }
}
