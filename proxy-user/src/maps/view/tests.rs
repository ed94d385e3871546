use super::*;
use proxy_common::backend::BackendEntry;
use proxy_common::service::{KIND_NODE_PORT, SERVICE_DROP_WHEN_EMPTY};

#[test]
fn no_pins_is_an_error_that_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let error = View::open(folder.path()).unwrap_err().to_string();
    for word in ["no BPF file system", folder.path().to_str().unwrap(), "--bpffs"] {
        assert!(error.contains(word), "{word} is missing in: {error}");
    }
}

#[test]
fn another_layout_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("ballast/v999")).unwrap();
    let error = View::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("version 999") && error.contains(&format!("version {ABI_VERSION}")), "{error}");
}

#[test]
fn a_missing_pin_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join(format!("ballast/v{ABI_VERSION}"))).unwrap();
    let error = View::open(folder.path()).unwrap().names().unwrap_err().to_string();
    assert!(error.contains(&format!("ballast/v{ABI_VERSION}/names")), "{error}");
}

#[test]
fn a_frontend_is_shown_in_words() {
    let key = ServiceKey { addr: [0u8; 16], port: 30_080, proto: 17, scope: 1 };
    let entry = ServiceEntry {
        id: 9,
        kind: KIND_NODE_PORT,
        flags: SERVICE_DROP_WHEN_EMPTY,
        affinity_secs: 60,
        ..ServiceEntry::default()
    };
    let row = FrontendRow::of(key, &entry);
    assert_eq!(row.socket().to_string(), "[::]:30080");
    assert_eq!(row.protocol.to_string(), "UDP");
    assert_eq!((row.kind.label(), row.scope.into(), row.algorithm), ("NodePort", "external", "random"));
    assert_eq!(row.when_empty, "drop");
    assert_eq!((row.service, row.affinity_secs), (9, 60));
}

#[test]
fn a_name_comes_apart() {
    let row = NameRow::of(&PortName::new("kube-system/kube-dns:dns-tcp", 6, 6).unwrap());
    assert_eq!((&*row.namespace, &*row.name, &*row.port), ("kube-system", "kube-dns", "dns-tcp"));
    assert_eq!(row.family, proxy_core::model::net::IpFamily::V6);
    assert_eq!(row.to_string(), "kube-system/kube-dns:dns-tcp");
    assert_eq!(NameRow::of(&PortName::new("a/b", 6, 4).unwrap()).to_string(), "a/b");
}

#[test]
fn a_free_backend_is_no_row() {
    assert_eq!(BackendRow::of(BackendEntry::<[u8; 4]>::FREE), None);
    let gone = BackendEntry { addr: [10, 0, 0, 1], port: 80, proto: 6, state: 2, service: 4, flags: 3 };
    let row = BackendRow::of(gone).unwrap();
    assert_eq!((row.state, row.local, row.terminating), (BackendState::Gone, true, true));
    assert_eq!(row.socket.to_string(), "10.0.0.1:80");
}

#[test]
fn cpus_are_added_up() {
    let one = ServiceStats { connections: 1, packets: 2, bytes: 3, reply_packets: 4, reply_bytes: 5 };
    let sum = [one, one].iter().fold(ServiceStats::default(), add);
    assert_eq!(sum, ServiceStats { connections: 2, packets: 4, bytes: 6, reply_packets: 8, reply_bytes: 10 });
}
