use std::os::unix::fs::symlink;

use tempfile::TempDir;
use tokio::time::timeout;

use super::*;

fn service(name: &str, address: &str) -> String {
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {address}}}\n")
}

/// A watched folder, with its events.
struct Watched {
    dir: TempDir,
    events: Receiver<Event>,
}

impl Watched {
    fn start(files: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        Self::watch(dir)
    }

    fn watch(dir: TempDir) -> Self {
        let (sender, events) = mpsc::channel(16);
        tokio::spawn(run(dir.path().to_owned(), Role::Alone, sender, watch::channel(Vec::new()).0));
        Self { dir, events }
    }

    /// Returns the Services of the next report as `name=address`.
    async fn next(&mut self) -> Vec<String> {
        let event = timeout(Duration::from_secs(30), self.events.recv()).await.expect("an event").unwrap();
        let Event::Reset(Listing::Services(services)) = event else { panic!("{event:?}") };
        let slices = self.events.recv().await.unwrap();
        assert!(matches!(slices, Event::Reset(Listing::Slices(_))), "{slices:?}");
        services.iter().map(|s| format!("{}={}", s.name.name, s.cluster_ips[0])).collect()
    }

    /// Waits for the first report with these Services; others may come before it.
    async fn until(&mut self, expected: &[&str]) {
        while self.next().await != expected {}
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[tokio::test]
async fn files_are_read_in_order_and_others_are_not() {
    let (a, b) = (service("a", "10.96.0.1"), service("b", "10.96.0.2"));
    let json =
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"c"},"spec":{"clusterIP":"10.96.0.3"}}"#;
    let first = service("a", "10.96.0.9");
    let mut folder = Watched::start(&[
        ("3.yaml", &a),
        ("2.yml", &b),
        ("4.json", json),
        ("1.yaml", &first),
        (".hidden.yaml", &service("h", "10.96.0.4")),
        ("readme.txt", "no: [manifest"),
    ]);
    fs::create_dir(folder.path("folder.yaml")).unwrap();
    assert_eq!(
        folder.next().await,
        ["a=10.96.0.9", "b=10.96.0.2", "c=10.96.0.3"],
        "of two, the first counts"
    );
}

#[tokio::test]
async fn changes_are_seen() {
    let mut folder = Watched::start(&[("a.yaml", &service("a", "10.96.0.1"))]);
    assert_eq!(folder.next().await, ["a=10.96.0.1"]);
    fs::write(folder.path("b.yaml"), service("b", "10.96.0.2")).unwrap();
    folder.until(&["a=10.96.0.1", "b=10.96.0.2"]).await;
    // Save as an editor does.
    fs::write(folder.path(".a.yaml.new"), service("a", "10.96.0.3")).unwrap();
    fs::rename(folder.path(".a.yaml.new"), folder.path("a.yaml")).unwrap();
    folder.until(&["a=10.96.0.3", "b=10.96.0.2"]).await;
    fs::remove_file(folder.path("a.yaml")).unwrap();
    folder.until(&["b=10.96.0.2"]).await;
}

#[tokio::test]
async fn a_broken_file_keeps_what_it_held() {
    let mut folder = Watched::start(&[("a.yaml", &service("a", "10.96.0.1"))]);
    folder.next().await;
    fs::write(folder.path("a.yaml"), "apiVersion: [v1\n").unwrap();
    fs::write(folder.path("b.yaml"), service("b", "10.96.0.2")).unwrap();
    folder.until(&["a=10.96.0.1", "b=10.96.0.2"]).await;
    fs::write(folder.path("a.yaml"), service("a", "10.96.0.5")).unwrap();
    folder.until(&["a=10.96.0.5", "b=10.96.0.2"]).await;
}

#[test]
fn file_that_became_empty_keeps_its_objects_and_is_a_problem() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.yaml");
    let read = |folder: Folder, content: &str| {
        fs::write(&path, content).unwrap();
        let (folder, _) = folder.read();
        let used = folder.objects().0.len();
        let problems = folder.problems();
        (folder, used, problems)
    };
    let (folder, used, problems) = read(Folder::new(dir.path().to_owned(), true), "");
    assert_eq!((used, problems.len()), (0, 0), "it never had an object");
    let manifest = service("a", "10.96.0.1");
    let (mut folder, ..) = read(folder, &manifest);
    for empty in ["", "\n"] {
        let (after, used, problems) = read(folder, empty);
        assert_eq!(used, 1);
        assert!(
            problems[0].contains("a.yaml is not used: it is empty now; to remove its objects"),
            "{problems:?}"
        );
        folder = after;
    }
    let (folder, used, problems) = read(folder, &manifest);
    assert_eq!((used, problems.len()), (1, 0), "as before");
    let (_, used, problems) = read(folder, "{apiVersion: v1, kind: List}");
    assert_eq!((used, problems.len()), (0, 0));
}

#[rstest::rstest]
#[case::alone(true, &["EndpointSlice default/web-1 is ignored, because no file has the Service default/webb; did you mean web?"])]
#[case::beside_an_api_server(false, &[])]
fn slice_without_its_service_is_a_problem(#[case] is_alone: bool, #[case] expected: &[&str]) {
    let dir = TempDir::new().unwrap();
    let slice = |name: &str, service: &str| {
        format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nendpoints: []\n\
             metadata: {{name: {name}, labels: {{kubernetes.io/service-name: {service}}}}}\n"
        )
    };
    fs::write(dir.path().join("a.yaml"), service("web", "10.96.0.1")).unwrap();
    fs::write(dir.path().join("b.yaml"), slice("web-1", "webb")).unwrap();
    fs::write(dir.path().join("c.yaml"), service("headless", "None")).unwrap();
    fs::write(dir.path().join("d.yaml"), slice("headless-1", "headless")).unwrap();
    let (folder, _) = Folder::new(dir.path().to_owned(), is_alone).read();
    let problems = folder.problems();
    let texts: Vec<_> = problems.iter().filter_map(|problem| Some(problem.split_once(": ")?.1)).collect();
    assert_eq!(texts, expected);
}

#[tokio::test]
async fn a_mounted_config_map_is_followed() {
    let dir = TempDir::new().unwrap();
    for (version, address) in [("..1", "10.96.0.1"), ("..2", "10.96.0.2")] {
        fs::create_dir(dir.path().join(version)).unwrap();
        fs::write(dir.path().join(version).join("a.yaml"), service("a", address)).unwrap();
    }
    symlink("..1", dir.path().join("..data")).unwrap();
    symlink("..data/a.yaml", dir.path().join("a.yaml")).unwrap();
    let mut folder = Watched::watch(dir);
    assert_eq!(folder.next().await, ["a=10.96.0.1"]);
    symlink("..2", folder.path("..data_tmp")).unwrap();
    fs::rename(folder.path("..data_tmp"), folder.path("..data")).unwrap();
    folder.until(&["a=10.96.0.2"]).await;
}

#[tokio::test]
async fn a_folder_may_come_later_and_go_again() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("manifests");
    let (sender, events) = mpsc::channel(16);
    let task = tokio::spawn(run(path.clone(), Role::Alone, sender, watch::channel(Vec::new()).0));
    let mut folder = Watched { dir: parent, events };
    let nothing = timeout(Duration::from_millis(300), folder.events.recv()).await;
    assert!(nothing.is_err(), "a folder that is not there is not an empty one");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("a.yaml"), service("a", "10.96.0.1")).unwrap();
    folder.until(&["a=10.96.0.1"]).await;
    // Replace the folder by another one of the same name.
    fs::rename(&path, folder.path("old")).unwrap();
    fs::create_dir(folder.path("new")).unwrap();
    fs::write(folder.path("new").join("a.yaml"), service("a", "10.96.0.2")).unwrap();
    fs::rename(folder.path("new"), &path).unwrap();
    folder.until(&["a=10.96.0.2"]).await;
    drop(folder);
    timeout(Duration::from_secs(10), task).await.expect("it stops with its receiver").unwrap();
}

#[test]
fn nothing_new_is_not_a_change() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.yaml");
    fs::write(&path, service("a", "10.96.0.1")).unwrap();
    let (folder, is_changed) = Folder::new(dir.path().to_owned(), true).read();
    assert!(is_changed);
    fs::write(&path, service("a", "10.96.0.1")).unwrap();
    let (folder, is_changed) = folder.read();
    assert!(!is_changed, "the same content");
    fs::write(&path, "kind: [").unwrap();
    let (folder, is_changed) = folder.read();
    assert!(!is_changed && folder.files.values().all(|f| f.failure.is_some()));
    fs::remove_dir_all(dir.path()).unwrap();
    let (folder, is_changed) = folder.read();
    assert!(!is_changed && folder.objects().0.len() == 1, "what was read stays");
}

#[tokio::test]
async fn beside_an_api_server_it_holds_static_services() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("a.yaml"), service("a", "10.96.0.1")).unwrap();
    let (sender, mut events) = mpsc::channel(1);
    let (begun, has_begun) = oneshot::channel();
    tokio::spawn(run(
        dir.path().to_owned(),
        Role::BesideApiServer { begun },
        sender,
        watch::channel(Vec::new()).0,
    ));
    timeout(Duration::from_secs(30), has_begun).await.expect("the folder can be read").unwrap();
    assert_eq!(events.len(), 1, "its objects come before");
    for expected in [&["a"][..], &[]] {
        let event = timeout(Duration::from_secs(30), events.recv()).await.expect("an event").unwrap();
        let Event::Static { services, slices } = event else { panic!("{event:?}") };
        assert_eq!(services.iter().map(|service| &*service.name.name).collect::<Vec<_>>(), expected);
        assert!(slices.is_empty());
        let _ = fs::remove_file(dir.path().join("a.yaml"));
    }
}

#[tokio::test]
async fn a_folder_that_is_missing_holds_up_no_api_server() {
    let dir = TempDir::new().unwrap();
    let (sender, mut events) = mpsc::channel(1);
    let (begun, has_begun) = oneshot::channel();
    tokio::spawn(run(
        dir.path().join("missing"),
        Role::BesideApiServer { begun },
        sender,
        watch::channel(Vec::new()).0,
    ));
    timeout(Duration::from_secs(30), has_begun).await.expect("nothing is waited for").unwrap();
    assert!(events.try_recv().is_err());
}

#[tokio::test]
async fn a_folder_or_file_that_cannot_be_read_is_a_problem_until_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manifests");
    let (sender, _events) = mpsc::channel(16);
    let (report, mut problems) = watch::channel(Vec::new());
    tokio::spawn(run(path.clone(), Role::Alone, sender, report));
    let mut next = async || {
        timeout(Duration::from_secs(20), problems.changed()).await.unwrap().unwrap();
        problems.borrow_and_update().join("")
    };
    assert!(next().await.contains("manifests cannot be read"));
    fs::create_dir(&path).unwrap();
    assert_eq!(next().await, "");
    fs::write(path.join("a.yaml"), "kind: [\n").unwrap();
    let log = next().await;
    assert!(log.contains("a.yaml is not used: document 1, line 1"), "{log}");
    fs::write(path.join("a.yaml"), "").unwrap();
    assert_eq!(next().await, "");
    fs::write(path.join("a.yaml"), service("web", "10.96.0.1")).unwrap();
    fs::write(path.join("b.yaml"), service("web", "10.96.0.2")).unwrap();
    let log = next().await;
    assert!(log.contains("b.yaml: Service default/web is ignored, because a.yaml has one"), "{log}");
    fs::remove_file(path.join("a.yaml")).unwrap();
    assert_eq!(next().await, "");
    // Reading these would never end.
    let pipe = path.join("a.yaml");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let log = next().await;
    assert!(log.contains("a.yaml is not used: it is not a regular file"), "{log}");
    fs::remove_file(&pipe).unwrap();
    symlink("/dev/zero", &pipe).unwrap();
    fs::remove_file(path.join("b.yaml")).unwrap();
    fs::write(path.join("c.yaml"), "a: [").unwrap();
    let log = next().await;
    assert!(log.contains("a.yaml is not used: it is not a regular file") && log.contains("c.yaml"), "{log}");
}
