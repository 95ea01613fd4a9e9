//! Each setting, and what is said about each that makes no sense.

use std::path::Path;
use std::time::Duration;

use super::{
    CacheConfig, CallerPins, Config, PeersConfig, RestoredInput, SenderQuota, SidecarConfig, StagingConfig,
    WatchedFolder,
};
use crate::agent::advisor::SitesPaths;
use crate::agent::preemption::Provider;
use crate::agent::routing::AgentSelector;
use crate::cache::TenantQuotas;
use crate::codec::Compression;
use crate::error::{Error, ErrorKind};
use crate::identity::Identity;
use crate::storage::Location;
use crate::transfer::peers::Transports;

fn parse(text: &str) -> Result<Config, Error> {
    Config::parse(text, Path::new("/etc/towline/agent.toml"))
}

/// Settings of an agent that others may link to, without rules.
const LISTENING: &str =
    "repository = '/r'\nidentity = 'i'\nlisten = '0.0.0.0:7071'\ncache = { dir = 'c', capacity = '1G' }\n";

/// Complaint about `text`, with its causes.
fn complaint(text: &str) -> String {
    let error = parse(text).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
    assert!(error.place().is_some(), "{text}");
    format!("{error:?}")
}

#[test]
fn every_setting_is_taken() {
    let config = parse(
        "socket = 'run/a.sock'\nhttp = '127.0.0.1:7070'\nrepositories = ['repo', 's3://bucket/prefix']\n\
         endpoint = 'http://localhost:9000'\nallow_http = true\nmemory = '1G'\ngrace = '90s'\n\
         identity = 'tls'\nlisten = '0.0.0.0:7071'\ncallers = ['home/*']\ntokens = 'own/tokens'\n\
         [peers]\naddresses = ['a:7071', 'b:7071']\ntransport = 'tcp'\nconnections = 4\n\
         dns = ['peers:7071']\nregister = '10.0.0.5:7071'\n\
         [[limits]]\nsite = 'cloud'\nrate = '300Mbit'\n[[limits]]\nsite = 'far'\nrate = '1M'\n\
         [staging]\nmemory = '40G'\nkeep = '1h'\n\
         [sidecar]\nwarm = ['run@latest']\nstage = ['base']\nrestore = [{ name = 'base', to = '/data', overwrite = true, delete = true }]\nhandoff_to = 'cloud'\npreemption = 'aws'\n\
         [[sidecar.watch]]\nfolder = '/ckpt'\nrun = 'run'\nsettle = 2\nrestore_latest = false\ncompression = 'predict'\n\
         [caller_pins]\nmax_time = '1h'\nmax_bytes = '1G'\nmax_pins = 3\nmax_chunks = 1000\n\
         [token_pins]\nmax_time = '2h'\n\
         [handoff]\ndir = 'kept'\ncapacity = '1G'\nwait = '1m'\ndeadline = '2m'\ntries = 3\n\
         [[handoff.accept]]\nfrom = 'home/a'\nnames = ['run/*']\nmax = '1M'\nmax_checkpoints = 2\n\
         [[allow]]\nagents = 'cloud/*'\nnames = ['run-7/*']\n\
         [cache]\ndir = '/var/cache'\ncapacity = '200G'\nfree_floor = 4096\ninventory = '5m'\nusage = '1h'\n\
         [advisor]\nsites = 'sites.toml'\nprices = '/etc/prices.toml'\n",
    )
    .unwrap();
    assert_eq!(config.socket, Path::new("/etc/towline/run/a.sock"));
    assert_eq!(config.http, Some(([127, 0, 0, 1], 7070).into()));
    let bucket = Location::S3 { bucket: "bucket".into(), prefix: "prefix".into() };
    assert_eq!(config.repositories, [Location::Directory("/etc/towline/repo".into()), bucket]);
    assert_eq!((config.store.endpoint.as_deref(), config.store.allow_http), (Some("http://localhost:9000"), true));
    assert_eq!(
        (config.tokens, config.token_pins.time),
        (Some("/etc/towline/own/tokens".into()), Duration::from_hours(2))
    );
    assert_eq!((config.memory, config.grace), (Some(1 << 30), Duration::from_secs(90)));
    let cache = CacheConfig {
        dir: "/var/cache".into(),
        capacity: 200 << 30,
        free_floor: 4096,
        quotas: TenantQuotas::default(),
        inventory: Duration::from_mins(5),
        usage: Duration::from_hours(1),
    };
    assert_eq!(config.cache, Some(cache));
    let (sites, prices) = ("/etc/towline/sites.toml".into(), Some("/etc/prices.toml".into()));
    assert_eq!(config.advisor, Some(SitesPaths { sites, prices }));
    assert_eq!((config.identity, config.listen), (Some("/etc/towline/tls".into()), Some(([0, 0, 0, 0], 7071).into())));
    let addresses = vec!["a:7071".to_owned(), "b:7071".to_owned()];
    let peers = PeersConfig {
        addresses,
        names: vec!["peers:7071".into()],
        register: Some("10.0.0.5:7071".into()),
        registered: true,
        limits: vec![("cloud".into(), 37_500_000), ("far".into(), 1 << 20)],
        transports: Transports::Tcp,
        connections: Some(4),
    };
    assert_eq!(config.peers, peers);
    let watched = WatchedFolder {
        folder: "/ckpt".into(),
        run: "run".parse().unwrap(),
        settle: Duration::from_secs(2),
        restore_latest: false,
        compression: Compression::Predict,
    };
    let sidecar = SidecarConfig {
        warm: vec!["run@latest".parse().unwrap()],
        stage: vec!["base".parse().unwrap()],
        restore: vec![RestoredInput {
            name: "base".parse().unwrap(),
            to: "/data".into(),
            overwrite: true,
            delete: true,
        }],
        watch: vec![watched],
        handoff_to: Some(AgentSelector::Site("cloud".into())),
        preemption: Some(Provider::Aws),
    };
    assert_eq!(config.sidecar, sidecar);
    assert_eq!(config.staging, Some(StagingConfig { memory: 40 << 30, keep: Duration::from_hours(1) }));
    let cloud = Identity::new("cloud", "a").unwrap();
    let handoff = config.handoff.unwrap();
    assert_eq!((handoff.dir.as_path(), handoff.capacity), (Path::new("/etc/towline/kept"), 1 << 30));
    let allowance = SenderQuota { bytes: 1 << 20, checkpoints: 2 };
    let (home, step) = (Identity::new("home", "a").unwrap(), "run/step-1".parse().unwrap());
    assert_eq!(handoff.accept.allowance(&home, &step), Some(allowance));
    assert!(handoff.accept.include(&home) && !handoff.accept.include(&cloud));
    assert_eq!((handoff.wait, handoff.deadline), (Duration::from_mins(1), Duration::from_mins(2)));
    assert_eq!(handoff.tries, 3);
    let pins = CallerPins { time: Duration::from_hours(1), bytes: 1 << 30, pins: 3, chunks: 1000 };
    assert_eq!(config.caller_pins, pins);
    assert!(config.callers.include(&Identity::new("home", "a").unwrap()) && !config.callers.include(&cloud));
    assert!(config.allow.allows(&cloud, &"run-7/step-1".parse().unwrap()));
    assert!(!config.allow.allows(&cloud, &"run-8/step-1".parse().unwrap()));
}

#[test]
fn little_need_be_said() {
    let config = parse("repository = '/repo'").unwrap();
    assert_eq!(config.repositories, [Location::Directory("/repo".into())]);
    assert_eq!(config.sidecar, SidecarConfig::default());
    assert!(parse("repository = '/r'\n[sidecar]\npreemption = 'none'").unwrap().sidecar.preemption.is_none());
    assert!(config.cache.is_none() && config.http.is_none() && config.socket.is_absolute());
    assert!(config.grace < Duration::from_secs(30), "Kubernetes waits no longer");
}

#[test]
fn a_pattern_is_a_text_or_a_list_wherever_it_stands() {
    let agent = |site: &str| Identity::new(site, "a").unwrap();
    for [agents, names, callers, from] in [
        ["'home/*'", "'run/*'", "'home/*'", "'home/*'"],
        ["['x/y', 'home/*']", "['run/*']", "['home/*']", "['home/*']"],
    ] {
        let accept = format!("[[handoff.accept]]\nfrom = {from}\nnames = {names}");
        let handoff = format!("[handoff]\ndir = 'k'\ncapacity = '1G'\n{accept}");
        let allow = format!("[[allow]]\nagents = {agents}\nnames = {names}");
        let config = parse(&format!("callers = {callers}\n{LISTENING}{handoff}\n{allow}")).unwrap();
        let allows = |site: &str, name: &str| config.allow.allows(&agent(site), &name.parse().unwrap());
        assert!(allows("home", "run/a") && !allows("home", "run/a/b") && !allows("cloud", "run/a"));
        assert!(config.callers.include(&agent("home")) && !config.callers.include(&agent("cloud")));
        let accept = config.handoff.unwrap().accept;
        assert!(accept.include(&agent("home")) && !accept.include(&agent("cloud")));
    }
    let help = parse(LISTENING).unwrap_err().help_text().unwrap().to_owned();
    assert!(help.ends_with("[[allow]] agents = \"**\" names = \"**\""), "{help}");
    let all = parse(&format!("{LISTENING}[[allow]]\nagents = '**'\nnames = '**'")).unwrap();
    assert!(all.allow.allows(&agent("any"), &"run/a/b".parse().unwrap()));
}

#[test]
fn what_makes_no_sense_is_named() {
    for (text, says) in [
        ("repository = '/r'\ncolour = 'red'", "unknown field `colour`"),
        ("repository = '/r'\n[cache]\ndir = 'c'\ncapacity = '1G'\nsize = 1", "unknown field `size`"),
        ("repository = '/r'\n[cache]\ndir = 'c'", "missing field `capacity`"),
        ("repository = '/r'\nmemory = 'much'", "not a size"),
        ("repository = '/r'\nmemory = -1", "a size such as"),
        ("repository = '/r'\ngrace = 'soon'", "not a time"),
        ("repository = '/r'\ntokens = 't'", "`tokens` is set, but not `http`"),
        ("repository = '/r'\nhttp = 'localhost'", "invalid socket address"),
        ("repository = '/r'\nhttp = '0.0.0.0:7070'", "not a loopback address"),
        ("repository = '/r'\nhttp = '[::]:7070'", "not a loopback address"),
        ("repository = 'ftp://r'", "scheme that is not offered"),
        ("repository = '/r'\nrepositories = ['/s']", "both `repository` and `repositories`"),
        ("repository = '/r'\nlisten = '0.0.0.0:7071'", "`listen` is set, but no identity"),
        ("repository = '/r'\nidentity = 'i'\nlisten = '0.0.0.0:7071'", "`listen` is set, but no cache"),
        ("repository = '/r'\n[peers]\naddresses = ['a:1']", "[peers] names other agents, but no identity"),
        ("repository = '/r'\n[peers]\nregistered = true", "[peers] names other agents, but no identity"),
        ("repository = '/r'\n[peers]\nregister = 'a:1'", "register is set, but not `listen`"),
        ("repository = '/r'\n[[limits]]\nsite = 'a'\nrate = 'fast'", "not a rate"),
        ("repository = '/r'\n[[limits]]\nsite = 'a'\nrate = '1Xbit'", "not a rate"),
        ("repository = '/r'\n[peers]\ntransport = 'pigeon'", "unknown variant `pigeon`"),
        ("repository = '/r'\n[[allow]]\nagents = '['\nnames = []", "malformed pattern"),
        ("repository = '/r'\n[[allow]]\nagents = 1\nnames = []", "a pattern, or a list of patterns"),
        (LISTENING, "`listen` is set, but no [[allow]] says"),
        ("repository = '/r'\ncallers = ['home/*']", "`callers` is set, but not `listen`"),
        ("repository = '/r'\nscrapers = ['home/*']", "`scrapers` is set, but not `listen`"),
        ("repository = '/r'\n[handoff]\ndir = 'k'\ncapacity = '1G'", "[handoff] is set, but not `listen`"),
        ("repository = '/r'\n[sidecar]\nhandoff_to = 'home'", "handoff_to is set, but [peers] names no other agent"),
        (
            "repository = '/r'\n[sidecar]\npreemption = 'pigeon'",
            "unknown variant `pigeon`, expected one of `none`, `aws`",
        ),
        ("repository = '/r'\n[sidecar]\nwarm = ['a']", "[sidecar] warm is set, but no cache"),
        ("repository = '/r'\n[sidecar]\nstage = ['a']", "[sidecar] stage is set, but no memory for tensors"),
        ("repository = '/r'\n[cache]\ndir = 'c'\ncapacity = '1G'\n[sidecar]\nwarm = ['a//b']", "not a name"),
        (
            "repository = '/r'\n[sidecar]\nrestore = [{ name = 'r@latest', to = 'c' }]\nwatch = [{ folder = 'c/', run = 'r' }]",
            "restore writes where [[sidecar.watch]] looks",
        ),
        (
            "repository = '/r'\n[sidecar]\nrestore = [{ name = 'b', to = 'c/step-1/b' }]\nwatch = [{ folder = 'c', run = 'r' }]",
            "expected a folder outside of /etc/towline/c",
        ),
        (
            "repository = '/r'\n[sidecar]\nrestore = [{ name = 'b', to = 'd', delete = true }]\nwatch = [{ folder = 'd/ckpt', run = 'r' }]",
            "would remove another folder",
        ),
        (
            "repository = '/r'\n[sidecar]\nrestore = [{ name = 'a', to = 'd/a' }, { name = 'b', to = 'd', delete = true }]",
            "would remove another folder",
        ),
        (
            "repository = '/r'\n[sidecar]\nwatch = [{ folder = 'c', run = 'r' }, { folder = 'd', run = 'r' }]",
            "two [[sidecar.watch]] have the same run",
        ),
        (
            "repository = '/r'\n[sidecar]\nwatch = [{ folder = 'c', run = 'r/step-4' }]",
            "the name of a step, not of a run at /etc/towline/agent.toml: expected a run, such as r",
        ),
        ("memory = '1G'", "no repository is set"),
        ("repository = ", "malformed"),
    ] {
        assert!(complaint(text).contains(says), "{text}: {}", complaint(text));
    }
}

#[test]
fn a_socket_path_has_107_bytes_at_most() {
    let of_len = |len: usize| format!("/{}", "s".repeat(len - 1));
    let with = |path: &str| format!("repository = '/r'\nsocket = '{path}'");
    assert!(parse(&with(&of_len(107))).is_ok());
    let said = complaint(&with(&of_len(108)));
    assert!(said.contains("at most 107 bytes, got 108"), "{said}");
}

#[test]
fn controllers_of_one_agent_share_what_is_held() {
    let agent = "repository = '/r'\nidentity = 'i'\n[cache]\ndir = 'c'\ncapacity = '1G'\n[advisor]\nsites = 's'\n";
    let section =
        |name: &str, more: &str| format!("[{name}]\n{more}\n[[{name}.allow]]\nnamespaces = 'ml'\nnames = '**'\n");
    let held = |sections: &str| {
        let config = parse(&format!("{agent}{sections}")).unwrap();
        let (kueue, gates) = (config.kueue.map(|kueue| kueue.access), config.gates.map(|gates| gates.access));
        [kueue, gates].map(|access| access.map(|access| access.held_names))
    };
    let (kueue, gates) = (section("kueue", ""), section("gates", ""));
    assert_eq!(held(&kueue), [Some(256), None]);
    assert_eq!(held(&gates), [None, Some(256)]);
    assert_eq!(held(&format!("{kueue}{gates}")), [Some(128), Some(128)]);
    assert_eq!(held(&section("gates", "held_names = 1000")), [None, Some(1000)]);
    let nothing = complaint(&format!("{agent}{}", section("gates", "held_names = 0")));
    assert!(nothing.contains("[gates] held_names is 0"), "{nothing}");
}
