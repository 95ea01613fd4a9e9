//! Rules and lists of revoked certificates that change while agents run. G4 of docs/semantics.md.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::together::{EVERYTHING, identities, start_peer_with};
use super::{PATIENCE, Running, told, told_json, with_tree};
use crate::cli::User;

/// Waits until `is_so` says something.
fn until<T>(what: &str, mut is_so: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is_so() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// An agent `home/a` that has all of run/step-1, and `home/b`, which knows it.
fn two(user: &User, transport: &str, rules: &str) -> (Running, Running) {
    user.ok(&["save", "tree", "run/step-1"]);
    identities(user);
    let first = start_peer_with(user, "a", &[], ("listen = '127.0.0.1:0'", rules));
    told_json(user, &first, &["warm", "run/step-1", "--wait"]);
    let addresses = [first.listen.clone().unwrap()];
    let second = start_peer_with(user, "b", &addresses, ("", &format!("transport = '{transport}'")));
    until("there is no link", || linked(&second).then_some(()));
    (first, second)
}

fn peer(agent: &Running) -> Value {
    agent.get("/v1/peers")["peers"][0].clone()
}

fn linked(agent: &Running) -> bool {
    !peer(agent)["transport"].is_null()
}

/// Writes a file as a whole.
fn replace(path: &Path, text: &str) {
    let fresh = path.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, path).unwrap();
}

/// Whether the agent at home gives all of run/step-1; what came stays out of the cache of whoever asked.
fn gives(agent: &Running) -> bool {
    agent.post("/v1/cache/evict", &json!({ "bytes": 1_u64 << 30 }), 200);
    let begun = agent.post("/v1/warm", &json!({ "name": "run/step-1", "from": "home" }), 202);
    let (_, end) = agent.events(&begun).pop().unwrap();
    end["state"] == "done" && end["report"]["missing"] == 0
}

/// "rules are read again when the file changes; a file that cannot be used changes nothing and is reported"
#[test]
fn rules_change_without_a_restart() {
    let user = with_tree();
    let (first, second) = two(&user, "auto", "[[allow]]\nagents = 'home/*'\nnames = 'other/*'");
    assert!(!gives(&second));
    let file = user.work().join("a.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let opened = text.replace("names = 'other/*'", "names = ['other/*', 'run/*']");
    replace(&file, &opened);
    until("what the new rules allow is refused", || gives(&second).then_some(()));

    replace(&file, &text.replace("names = 'other/*'", "names = ["));
    let problem = |agent: &Running| agent.get("/health")["problems"][0].as_str().map(str::to_owned);
    let said = until("a file that cannot be used is not told", || problem(&first));
    assert!(said.contains("the rules before hold") && said.contains("a.toml"), "{said}");
    assert!(gives(&second), "the rules before hold");

    replace(&file, &text);
    until("what was withdrawn is given", || (!gives(&second)).then_some(()));
    assert_eq!(problem(&first), None);
    second.stop();
    first.stop();
}

/// "A link ends as soon as either side finds the other's certificate revoked or expired"
#[test]
fn a_revoked_agent_loses_its_link() {
    for transport in ["quic", "tcp"] {
        for (revoking, revoked) in [("a", "b"), ("b", "a")] {
            let user = with_tree();
            let (first, second) = two(&user, transport, EVERYTHING);
            let shown = user.json(&["identity", "show", &format!("{revoked}/tls.crt")], 0);
            let serial = shown["certificates"][0]["serial"].as_str().unwrap();
            let list = user.work().join(revoking).join("revoked");
            replace(&list, &format!("the one of last week\n{serial}\n"));
            until("the link lasts, or nothing says why not", || {
                let says = revoking == "a" || peer(&second)["error"].to_string().contains("revoked");
                (!linked(&second) && says).then_some(())
            });
            // The malformed line is named, and holds up nothing.
            let agent = if revoking == "a" { &first } else { &second };
            let health = agent.get("/health")["problems"].to_string();
            assert!(health.contains("revoked, line 1"), "{health}");
            // What is empty, as one that is being written, lets nobody in.
            replace(&list, "");
            until("an empty list is not told", || {
                agent.get("/health")["problems"].to_string().contains("half written").then_some(())
            });
            // A handshake may look like a link for a moment.
            until("an empty list lets somebody in", || (!linked(&second)).then_some(()));
            second.stop();
            first.stop();
        }
    }
}

/// As docs/deploy.md says: backup, and another authority.
#[test]
fn an_authority_is_restored_from_its_copy_or_replaced_while_agents_run() {
    let user = with_tree();
    let (first, second) = two(&user, "auto", EVERYTHING);
    let work = user.work();
    let authority = work.parent().unwrap().join("home/.config/towline/authority");
    let copied = |from: &Path, to: &Path| {
        std::fs::create_dir_all(to).unwrap();
        for file in ["ca.crt", "ca.key"] {
            std::fs::copy(from.join(file), to.join(file)).unwrap();
        }
    };
    copied(&authority, &work.join("copy"));
    std::fs::remove_dir_all(&authority).unwrap();
    user.fails(&["identity", "rotate", "b"], 3);
    copied(&work.join("copy"), &authority);
    user.ok(&["identity", "rotate", "b"]);

    // Both are trusted, then the new one alone; a step takes effect without a restart.
    user.ok(&["identity", "init", "--authority", "new", "--name", "next"]);
    let [old, new] =
        [authority, work.join("new")].map(|folder| std::fs::read_to_string(folder.join("ca.crt")).unwrap());
    let trusted = |text: &str| {
        for folder in ["new", "a", "b"] {
            replace(&work.join(folder).join("ca.crt"), text);
        }
    };
    trusted(&format!("{new}{old}"));
    for agent in ["a", "b"] {
        user.ok(&["identity", "rotate", agent, "--authority", "new"]);
        assert_eq!(std::fs::read_to_string(work.join(agent).join("ca.crt")).unwrap(), format!("{new}{old}"));
        until("the link does not come back", || (linked(&second) && gives(&second)).then_some(()));
    }
    trusted(&new);
    until("the link does not come back", || (linked(&second) && gives(&second)).then_some(()));
    // An agent of the old authority is a stranger now.
    let third = start_peer_with(&user, "c", &[first.listen.clone().unwrap()], ("", ""));
    until("nothing says why there is no link", || (!peer(&third)["error"].is_null()).then_some(()));
    assert!(!linked(&third));
    for agent in [third, second, first] {
        agent.stop();
    }
}

/// "the agent answers its own user and root, and clients take answers from an agent of their own user or root"
#[test]
fn who_takes_over_a_folder_is_not_answered_and_gives_nothing_wrong() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;

    const OTHER: u32 = 4711;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    told(&user, &agent, &["warm", "run/step-1", "--wait"]);
    let top = user.work().parent().unwrap().to_owned();
    for folder in [top.clone(), user.work(), top.join("home")] {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let asks = || {
        let mut command = user.command(&["top", "--once"]);
        command.env("TOWLINE_AGENT", &agent.socket).uid(OTHER).gid(OTHER).current_dir("/");
        command.output()
    };
    // Where the program lies in a folder of root's, nobody else can run it.
    let Ok(before) = asks() else { return };
    assert!(!before.status.success());
    for path in [agent.socket.parent().unwrap(), &agent.socket, &user.work().join("cache")] {
        std::os::unix::fs::chown(path, Some(OTHER), Some(OTHER)).unwrap();
    }
    let refused = asks().unwrap();
    assert_eq!(refused.status.code(), Some(6), "{}", String::from_utf8_lossy(&refused.stderr));

    // Its own user goes on; what is tampered with is found out, and comes from the repository.
    assert_eq!(agent.get("/health")["ready"], true);
    let files = std::fs::read_dir(user.work().join("cache")).unwrap().map(|entry| entry.unwrap().path());
    let is_slab = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("slab-");
    let slabs: Vec<PathBuf> = files.filter(is_slab).collect();
    assert!(!slabs.is_empty());
    for path in slabs {
        let bytes = std::fs::read(&path).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let spoilt: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &spoilt, 0).unwrap();
    }
    told(&user, &agent, &["restore", "run/step-1", "out"]);
    assert_eq!(user.read("out/sub/b.bin"), crate::data::noise(1, 20 << 20));
    agent.stop();
}
