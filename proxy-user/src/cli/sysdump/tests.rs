use std::collections::BTreeMap;
use std::io::Read as _;

use flate2::read::GzDecoder;

use super::*;
use proxy_cli::archive::private;

const TOKEN: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJlLW9mLWl0";

fn unpack(archive: &[u8]) -> BTreeMap<String, String> {
    let mut tar = tar::Archive::new(GzDecoder::new(archive));
    let read = |entry: io::Result<tar::Entry<'_, GzDecoder<&[u8]>>>| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    };
    tar.entries().unwrap().map(read).collect()
}

#[test]
fn an_archive_has_what_could_be_read_and_says_what_could_not() {
    let mut bytes = Vec::new();
    let mut archive = Archive::new(&mut bytes, "dump".to_owned(), 1);
    let log = format!("asked with {TOKEN}\npassword: hunter2\nall is well\n");
    archive.add(("logs/a.txt".to_owned(), Ok(log.into_bytes()))).unwrap();
    archive.add(("maps".to_owned(), Err(format!("refused, token={TOKEN}")))).unwrap();
    archive.add(("binary".to_owned(), Ok(vec![0xff, 0xfe]))).unwrap();
    let (files, failures) = archive.finish().unwrap();
    assert_eq!((files, failures.lines().count()), (2, 2));
    let files = unpack(&bytes);
    assert!(files["dump/logs/a.txt"].contains("all is well"), "{files:?}");
    assert!(files["dump/failures.txt"].contains("maps: refused"), "{files:?}");
    let all = files.values().cloned().collect::<String>();
    assert!(!all.contains("eyJ") && !all.contains("hunter2"), "{all}");
}

#[test]
fn without_agent_and_maps_there_is_an_archive_that_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump.tar.gz");
    let words = ["ballast", "sysdump", "--metrics-bind-address", "127.0.0.1:1", "--bpffs"];
    let words = words.iter().map(std::ffi::OsStr::new).chain([folder.path().as_os_str(), file.as_os_str()]);
    let args = <crate::cli::Args as clap::Parser>::parse_from(words);
    let crate::cli::Command::Sysdump(args) = args.command else { panic!("another command") };
    let said = run(&args, || Err("not checked".to_owned())).unwrap();
    assert!(said.contains("see failures.txt"), "{said}");
    let files = unpack(&std::fs::read(&file).unwrap());
    let of = |end: &str| files.iter().find(|(name, _)| name.ends_with(end)).map(|(_, text)| text.clone());
    let failures = of("/failures.txt").unwrap();
    for part in
        ["agent: no answer at 127.0.0.1:1", "maps: no BPF file system is mounted", "check.json: not checked"]
    {
        assert!(failures.contains(part), "{part} is missing in: {failures}");
    }
    assert!(
        of("/status.json").unwrap().contains("\"down\"")
            && of("/system/sysctls.txt").unwrap().contains("net.")
    );
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "others do not read it");
}

#[test]
fn an_archive_is_readable_by_its_owner_only_also_if_the_file_existed() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.tar.gz");
    std::fs::write(&path, "of before").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    for path in [path, folder.path().join("new.tar.gz")] {
        let metadata = private(&path).unwrap().metadata().unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.len()), (0o600, 0), "{}", path.display());
    }
}
