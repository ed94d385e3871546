//! The bill of materials: every crate whose code is in the binary, as `CycloneDX` 1.6.
//!
//! Crates that only build or test are left out. Checksums are those that cargo checked the downloads against.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use super::oci;
use crate::exec::Cmd;
use crate::workspace::Workspace;

/// What is in the binary: the agent, and the BPF programs that it embeds.
const ROOTS: [&str; 2] = ["proxy-user", "proxy-ebpf"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    description: Option<String>,
    repository: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `None` for an ordinary dependency, else `dev` or `build`.
    kind: Option<String>,
}

/// The document; `time` in seconds since 1970.
pub(super) fn bill(workspace: &Workspace, time: u64) -> Result<Vec<u8>> {
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = Cmd::cargo()
        .args(["metadata", "--locked", "--format-version=1", "--filter-platform", &host])
        .dir(workspace.root())
        .read()?;
    let lock = workspace.root().join("Cargo.lock");
    let lock = fs::read_to_string(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
    let bill = document(&metadata, &lock, &linked(), time)?;
    serde_json::to_vec_pretty(&bill).context("cannot write the bill of materials")
}

/// What is linked statically without being a crate: name and version.
fn linked() -> Vec<(String, String)> {
    let library = Cmd::new("getconf").arg("GNU_LIBC_VERSION").try_read();
    let compiler =
        Cmd::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("--version").try_read();
    let library = library.as_deref().and_then(|text| text.trim().split_once(' '));
    let compiler = compiler.as_deref().and_then(|text| text.strip_prefix("rustc ")?.split(' ').next());
    let both = [library, compiler.map(|version| ("rust-std", version))];
    both.into_iter().flatten().map(|(name, version)| (name.to_owned(), version.to_owned())).collect()
}

fn document(metadata: &str, lock: &str, linked: &[(String, String)], time: u64) -> Result<Value> {
    let metadata: Metadata =
        serde_json::from_str(metadata).context("cargo metadata printed something unexpected")?;
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let edges = edges(&metadata.resolve);
    let roots =
        metadata.packages.iter().filter(|one| one.source.is_none() && ROOTS.contains(&one.name.as_str()));
    let inside = reached(&edges, roots.map(|package| package.id.as_str()));
    let inside: Vec<&Package> = inside.iter().filter_map(|id| packages.get(id).copied()).collect();
    let checksums = checksums(lock);

    let mut components: Vec<Value> = inside.iter().map(|package| component(package, &checksums)).collect();
    components.extend(linked.iter().map(|(name, version)| {
        json!({
            "type": "library",
            "bom-ref": format!("pkg:generic/{name}@{version}"),
            "name": name,
            "version": version,
            "purl": format!("pkg:generic/{name}@{version}"),
        })
    }));
    let mut dependencies: Vec<Value> = inside
        .iter()
        .map(|package| {
            let on = edges.get(package.id.as_str()).into_iter().flatten();
            let on: BTreeSet<String> =
                on.filter_map(|id| packages.get(id)).map(|package| purl(package)).collect();
            json!({ "ref": purl(package), "dependsOn": on })
        })
        .collect();
    let top: BTreeSet<_> =
        components.iter().filter_map(|one| one["bom-ref"].as_str()).map(str::to_owned).collect();
    dependencies.insert(0, json!({ "ref": "ballast", "dependsOn": top }));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": oci::rfc3339(time),
            "component": {
                "type": "application",
                "bom-ref": "ballast",
                "name": "ballast",
                "version": env!("CARGO_PKG_VERSION"),
                "licenses": [{ "expression": "Apache-2.0" }],
            },
        },
        "components": components,
        "dependencies": dependencies,
    }))
}

/// Ordinary dependencies, by package.
fn edges(resolve: &Resolve) -> BTreeMap<&str, BTreeSet<&str>> {
    let is_ordinary = |one: &&Dependency| one.dep_kinds.iter().any(|kind| kind.kind.is_none());
    let nodes = resolve.nodes.iter();
    nodes
        .map(|node| {
            let on = node.deps.iter().filter(is_ordinary).map(|one| one.pkg.as_str());
            (node.id.as_str(), on.collect())
        })
        .collect()
}

fn reached<'a>(
    edges: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    roots: impl Iterator<Item = &'a str>,
) -> BTreeSet<&'a str> {
    let (mut found, mut waiting) = (BTreeSet::new(), roots.collect::<Vec<_>>());
    while let Some(id) = waiting.pop() {
        if found.insert(id) {
            waiting.extend(edges.get(id).into_iter().flatten());
        }
    }
    found
}

fn purl(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

fn component(package: &Package, checksums: &BTreeMap<(&str, &str), &str>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
    });
    if let Some(text) = &package.description {
        component["description"] = text.split_whitespace().collect::<Vec<_>>().join(" ").into();
    }
    if let Some(licence) = &package.license {
        // Some crates still write `/`, which SPDX expressions do not have.
        let expression = licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ");
        component["licenses"] = json!([{ "expression": expression }]);
    }
    if let Some(url) = &package.repository {
        component["externalReferences"] = json!([{ "type": "vcs", "url": url }]);
    }
    if let Some(checksum) = checksums.get(&(package.name.as_str(), package.version.as_str())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// Checksums in a Cargo.lock, by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let blocks = lock.split("[[package]]");
    blocks
        .filter_map(|block| {
            Some(((value(block, "name")?, value(block, "version")?), value(block, "checksum")?))
        })
        .collect()
}

/// The string behind `key = ` at the start of a line.
fn value<'a>(block: &'a str, key: &str) -> Option<&'a str> {
    let quoted = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
    quoted.strip_prefix('"')?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, source: &str) -> String {
        format!(
            r#"{{"id":"{name}","name":"{name}","version":"1.0.0","license":"MIT/Apache-2.0","source":{source},
                "description":"One\nline.","repository":null}}"#
        )
    }

    fn dependency(name: &str, kind: &str) -> String {
        format!(r#"{{"pkg":"{name}","dep_kinds":[{{"kind":{kind}}}]}}"#)
    }

    /// The agent needs `a`, which needs `b`; it builds with `c` and tests with `d`.
    fn metadata() -> String {
        let registry = r#""registry""#;
        let packages = ["a", "b", "c", "d"].map(|name| package(name, registry)).join(",")
            + ","
            + &package("proxy-user", "null");
        let own = [("a", "null"), ("c", r#""build""#), ("d", r#""dev""#)]
            .map(|(name, kind)| dependency(name, kind));
        let nodes = format!(
            r#"{{"id":"proxy-user","deps":[{}]}},{{"id":"a","deps":[{}]}},{{"id":"b","deps":[]}}"#,
            own.join(","),
            dependency("b", "null"),
        );
        format!(r#"{{"packages":[{packages}],"resolve":{{"nodes":[{nodes}]}}}}"#)
    }

    #[test]
    fn what_is_in_the_binary_is_listed_and_nothing_else() {
        let lock = "version = 4\n\n[[package]]\nname = \"b\"\nversion = \"1.0.0\"\nchecksum = \"beef\"\n";
        let linked = [("glibc".to_owned(), "2.36".to_owned())];
        let bill = document(&metadata(), lock, &linked, 0).unwrap();
        let components = bill["components"].as_array().unwrap();
        let names: Vec<_> = components.iter().map(|one| one["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "proxy-user", "glibc"]);
        assert_eq!(components[0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(components[0]["description"], "One line.");
        assert_eq!(components[0]["hashes"], Value::Null);
        assert_eq!(components[1]["hashes"][0]["content"], "beef");
        assert_eq!(
            bill["dependencies"][1],
            json!({ "ref": "pkg:cargo/a@1.0.0", "dependsOn": ["pkg:cargo/b@1.0.0"] })
        );
    }

    #[test]
    fn the_projects_own_bill_has_every_checksum() {
        let text = bill(&Workspace::find().unwrap(), 0).unwrap();
        let bill: Value = serde_json::from_slice(&text).unwrap();
        let crates = bill["components"].as_array().unwrap().iter();
        let crates = crates.filter(|one| one["purl"].as_str().unwrap().starts_with("pkg:cargo/"));
        let (ours, others): (Vec<_>, Vec<_>) =
            crates.partition(|one| one["name"].as_str().unwrap().starts_with("proxy-"));
        assert_eq!(ours.len(), 3, "{ours:?}");
        assert!(
            others.iter().any(|one| one["name"] == "kube")
                && others.iter().any(|one| one["name"] == "aya-ebpf")
        );
        assert!(others.iter().all(|one| one["name"] != "proptest"), "tests are not shipped");
        for one in others {
            assert_eq!(one["hashes"][0]["content"].as_str().map(str::len), Some(64), "{one}");
            assert!(one["licenses"][0]["expression"].is_string(), "{one}");
        }
    }
}
