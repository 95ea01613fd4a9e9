//! Tests of rulings: the deciding rule, the order of checks, and speed.

use super::*;
use crate::error::ErrorKind;
use crate::identity::Identity;
use crate::name::Name;

const POLICY: &str = r#"
version = 3
repository = "01K9ZQBF5628NEHV0HKGX7E3TC"

[[site]]
name = "home"
jurisdiction = ["de", "EU"]
tenancy = "own"
repositories = ["s3://models", "/srv/towline"]

[[site]]
name = "cloud"
jurisdiction = "US"
tenancy = "shared"
private_store = true

[[link]]
between = ["home", "cloud"]
addresses = ["10.1.0.0/16", "10.2.0.0/16"]

[[rule]]
verdict = "deny"
names = "patients/raw/**"
to = "cloud"
why = "raw patient data stays at home"

[[rule]]
verdict = "allow"
names = ["patients/**", "runs/**"]
sensitivity-at-most = "restricted"
path = "private"
why = "over the line of our own"

[[rule]]
verdict = "allow"
to = "home"
tenant = "research"
why = "ours"

[[rule]]
verdict = "deny"
purpose = "evaluation"
why = "not for training"

[[rule]]
verdict = "allow"
sensitivity-at-most = "internal"
agents = "cloud/*"
why = "everybody's"
"#;

fn labels(text: &str) -> Labels {
    let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    pairs.fold(Labels::default(), |labels, (key, value)| labels.with(key, value).unwrap())
}

struct Query {
    name: Name,
    labels: Labels,
    agent: Option<Identity>,
    caller: Option<LocalCaller>,
    to: Option<&'static str>,
    route: Route,
}

/// Question about `name` with labels, by `cloud/a` for its site over a public path.
fn asked(name: &str, label: &str) -> Query {
    let connection = Route::Connection { local: [192, 0, 2, 1].into(), remote: [192, 0, 2, 2].into() };
    Query {
        name: name.parse().unwrap(),
        labels: labels(label),
        agent: Some(Identity::new("cloud", "a").unwrap()),
        caller: None,
        to: Some("cloud"),
        route: connection,
    }
}

fn private(asked: Query) -> Query {
    let route = Route::Connection { local: [10, 1, 0, 1].into(), remote: [10, 2, 0, 1].into() };
    Query { route, ..asked }
}

fn ruling(asked: &Query) -> Ruling {
    ruling_of(&PolicyRules::read(POLICY).unwrap(), asked)
}

fn ruling_of(policy: &PolicyRules, asked: &Query) -> Ruling {
    policy.rule_on(&Question {
        agent: asked.agent.as_ref(),
        caller: asked.caller.as_ref(),
        from: Some("home"),
        to: asked.to,
        name: &asked.name,
        labels: &asked.labels,
        route: asked.route,
    })
}

/// Reason of the deciding rule.
fn why(asked: &Query) -> String {
    match ruling(asked).basis {
        Basis::Rule { why, .. } => why,
        other => panic!("decided by {other}"),
    }
}

#[test]
fn the_first_rule_that_matches_decides() {
    let raw = private(asked("patients/raw/a", "sensitivity=internal"));
    assert_eq!(why(&raw), "raw patient data stays at home");
    assert!(!ruling(&raw).allows());
    let anonymous = private(asked("patients/anonymous", "sensitivity=restricted"));
    assert_eq!(why(&anonymous), "over the line of our own");
    assert_eq!(why(&asked("other/set", "")), "everybody's");
    assert_eq!(ruling(&asked("patients/anonymous", "sensitivity=restricted")).basis, Basis::NoRule);
    assert_eq!(ruling(&private(asked("patients/x", "sensitivity=secret"))).basis, Basis::NoRule);
    assert_eq!(ruling(&Query { agent: None, ..asked("other/set", "") }).basis, Basis::NoRule);
}

#[test]
fn a_private_path_is_told_by_both_addresses() {
    let run = || asked("runs/a", "sensitivity=restricted");
    assert!(ruling(&private(run())).allows());
    let mixed = Route::Connection { local: [10, 1, 0, 1].into(), remote: [192, 0, 2, 2].into() };
    assert!(!ruling(&Query { route: mixed, ..run() }).allows());
    assert!(ruling(&Query { route: Route::Node, ..run() }).allows());
    assert!(ruling(&Query { route: Route::Store, ..run() }).allows(), "the cloud's store is private");
    let home = || Query { to: Some("home"), ..run() };
    assert!(!ruling(&Query { route: Route::Store, ..home() }).allows());
    let unknown_source = PolicyRules::read(POLICY).unwrap().rule_on(&Question {
        agent: None,
        caller: None,
        from: None,
        to: Some("cloud"),
        name: &"runs/a".parse().unwrap(),
        labels: &Labels::default(),
        route: Route::Connection { local: [10, 1, 0, 1].into(), remote: [10, 2, 0, 1].into() },
    });
    assert!(!unknown_source.allows());
}

#[test]
fn no_rule_overrides_the_residency() {
    for (residency, allowed) in [("EU", false), ("EU,US", true), ("-", false)] {
        let ruling = ruling(&asked("other/set", &format!("residency={residency}")));
        assert_eq!(ruling.allows(), allowed, "{residency}");
        assert_eq!(ruling.basis == Basis::Residency, !allowed);
    }
}

#[test]
fn what_is_unknown_is_denied_where_there_are_labels() {
    for to in [None, Some("mars")] {
        let bound = Query { to, ..asked("other/set", "sensitivity=internal") };
        assert_eq!(ruling(&bound).basis, Basis::UnknownSite);
        let free = Query { to, ..asked("other/set", "") };
        assert!(ruling(&free).allows(), "{to:?}");
    }
}

#[test]
fn to_allow_takes_every_value_and_to_deny_one() {
    let at_home = |label: &str| Query { to: Some("home"), agent: None, ..asked("x", label) };
    assert_eq!(why(&at_home("tenant=research")), "ours");
    assert_eq!(ruling(&at_home("tenant=research,sales")).basis, Basis::NoRule);
    assert_eq!(ruling(&at_home("")).basis, Basis::NoRule);
    assert_eq!(why(&asked("x", "purpose=evaluation,training")), "not for training");
}

#[test]
fn a_policy_that_contradicts_itself_is_refused_with_the_line() {
    let refused = |from: &str, to: &str| {
        let text = POLICY.replacen(from, to, 1);
        assert_ne!(text, POLICY);
        let error = PolicyRules::read(&text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        (error.to_string(), text)
    };
    let (error, text) = refused("to = \"home\"\n", "to = \"moon\"\n");
    let line = text.lines().take_while(|line| !line.contains("moon")).collect::<Vec<_>>();
    let rule = line.iter().rposition(|line| *line == "[[rule]]").unwrap() + 1;
    assert!(error.contains("does not describe") && error.contains(&format!("line {rule}")), "{error}");
    assert!(refused("name = \"cloud\"", "name = \"home\"").0.contains("described twice"));
    assert!(refused("private_store = true", "repositories = \"s3://models\"").0.contains("two sites"));
    assert!(
        refused("between = [\"home\", \"cloud\"]", "between = [\"home\", \"moon\"]").0.contains("does not describe")
    );
    assert!(refused("version = 3", "version = \"x\"").0.contains("line 2"));
    assert!(refused("names = \"patients/raw/**\"", "nmaes = \"patients/raw/**\"").0.contains("malformed"));

    let again = "\n[[rule]]\nverdict = \"allow\"\npurpose = \"evaluation\"\nwhy = \"yes\"\n";
    let error = PolicyRules::read(&format!("{POLICY}{again}")).unwrap_err().to_string();
    assert!(error.contains("never reached") && error.contains("(deny)"), "{error}");
    let all = "\n[[rule]]\nverdict = \"deny\"\nwhy = \"the rest\"\n";
    assert!(PolicyRules::read(&format!("{POLICY}{all}")).is_ok());
    let after = "\n[[rule]]\nverdict = \"allow\"\nnames = \"x\"\nwhy = \"too late\"\n";
    assert!(PolicyRules::read(&format!("{POLICY}{all}{after}")).is_err());
}

#[test]
fn whoever_may_take_nothing_is_locked_out() {
    let policy = PolicyRules::read(POLICY).unwrap();
    let admits = |site: &str| policy.admits(&Identity::new(site, "a").unwrap());
    assert!(admits("cloud") && admits("home"));
    let only = "version = 1\nrepository = \"01K9ZQBF5628NEHV0HKGX7E3TC\"\n[[site]]\nname = \"home\"\n\
                [[rule]]\nverdict = \"allow\"\nto = \"home\"\nwhy = \"ours\"\n";
    let policy = PolicyRules::read(only).unwrap();
    assert!(policy.admits(&Identity::new("home", "a").unwrap()));
    assert!(!policy.admits(&Identity::new("cloud", "a").unwrap()));
}

#[test]
fn rules_about_callers_hold_for_those_who_are_known() {
    let rules = "[[rule]]\nverdict = 'deny'\ncallers = 'user:intern-*'\nnames = 'x/**'\nwhy = 'no interns'\n\
                 [[rule]]\nverdict = 'allow'\ncallers = 'token:ci'\ncaller-tenants = 'lab'\nnames = '{x,y}/**'\n\
                 why = 'the lab'\n[[rule]]\nverdict = 'allow'\nnames = 'x/**'\nwhy = 'the rest'\n";
    let head = POLICY.split_once("[[rule]]").unwrap().0;
    let policy = PolicyRules::read(&format!("{head}{rules}")).unwrap();
    let intern = Some(LocalCaller::user("intern-7"));
    let lab = Some(LocalCaller::token("ci", Some("lab")));
    let (other, none) = (Some(LocalCaller::token("ci", Some("sales"))), Some(LocalCaller::token("ci", None)));
    for (caller, name, label, expected) in [
        (&intern, "x/a", "", "no interns"),
        (&intern, "x/a", "sensitivity=internal", "no interns"),
        (&lab, "x/a", "sensitivity=internal", "the lab"),
        (&lab, "y/a", "sensitivity=internal", "the lab"),
        (&other, "x/a", "", "the rest"),
        (&none, "y/a", "", "no-rule"),
        // Nobody knows who asks: a rule that allows does not hold; one that denies does, where there are labels.
        (&None, "y/a", "sensitivity=internal", "no-rule"),
        (&None, "x/a", "", "the rest"),
        (&None, "x/a", "sensitivity=public", "the rest"),
        (&None, "x/a", "sensitivity=internal", "unknown-caller"),
    ] {
        let question = Query { caller: caller.clone(), ..asked(name, label) };
        assert_eq!(ruling_of(&policy, &question).basis.reason(), expected, "{caller:?} {name} {label}");
    }
    let twice = "[[rule]]\nverdict = 'deny'\ncallers = 'user:intern-*'\nnames = 'x/**'\nwhy = 'again'\n";
    let error = PolicyRules::read(&format!("{head}{rules}{twice}")).unwrap_err().to_string();
    assert!(error.contains("never reached"), "{error}");
}

#[test]
fn a_spiffe_id_is_an_agent_only_where_the_policy_says_so() {
    let mapped = "\n[[spiffe]]\nid = \"spiffe://example.org/ml/**\"\nagent = \"cloud/ml\"\n";
    let policy = PolicyRules::read(&format!("{POLICY}{mapped}")).unwrap();
    let id = |text: &str| Identity::spiffe(text).unwrap();
    assert_eq!(policy.agent(&id("spiffe://example.org/ml/a")).unwrap().path(), "cloud/ml");
    assert!(policy.agent(&id("spiffe://example.org/ops/a")).is_none());
    assert!(policy.admits(&id("spiffe://example.org/ml/a")) && !policy.admits(&id("spiffe://example.org/ops/a")));
    let refused = |more: &str| PolicyRules::read(&format!("{POLICY}{mapped}{more}")).unwrap_err().to_string();
    let line = format!("{POLICY}{mapped}").lines().count() + 1;
    for (more, told) in [
        ("[[spiffe]]\nid = 'spiffe://example.org/ml/a'\nagent = 'home/a'\n", "mapped twice"),
        ("[[spiffe]]\nid = 'spiffe://example.org/x'\nagent = 'moon/a'\n", "does not describe"),
        ("[[spiffe]]\nid = 'spiffe://example.org/x'\nagent = 'home'\n", "mapped to no agent"),
        ("[[spiffe]]\nid = 'spiffe://example.org/*'\nagent = 'home/a'\n", "malformed"),
        ("[[site]]\nname = 'spiffe://example.org'\n", "malformed"),
    ] {
        let error = refused(more);
        assert!(error.contains(told) && error.contains(&format!("line {line}")), "{told}: {error}");
    }
}

#[test]
fn repositories_lie_at_sites() {
    let policy = PolicyRules::read(POLICY).unwrap();
    let id = policy.repository();
    let at = |addresses: &[&str]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(policy.site_of(&at(&["s3://models"]), id), Some("home"));
    assert_eq!(policy.site_of(&at(&["s3://other"]), id), None);
    let by_id = PolicyRules::read(&POLICY.replacen("/srv/towline", &id.to_string(), 1)).unwrap();
    assert_eq!(by_id.site_of(&at(&["s3://other"]), id), Some("home"));
    assert_eq!(by_id.site_of_destination(&at(&["s3://other"])), None, "whoever has a store may give it any id");
    // Buckets of one name at two endpoints.
    let cloud = "private_store = true\nrepositories = \"https://S3.example.org:443/models/\"";
    let by_url = PolicyRules::read(&POLICY.replacen("private_store = true", cloud, 1)).unwrap();
    let there = |url: &str| at(&["s3://models", url]);
    assert_eq!(by_url.site_of_destination(&there("https://s3.example.org/models")), Some("cloud"));
    assert_eq!(by_url.site_of_destination(&there("https://s3.example.com/models")), Some("home"));
    for malformed in ["https://s3.example.org", "https:///", "http://[/models"] {
        let text = POLICY.replacen("/srv/towline", malformed, 1);
        assert!(PolicyRules::read(&text).unwrap_err().to_string().contains("malformed"), "{malformed}");
    }
}

#[test]
fn rules_found_by_the_index_are_those_that_match() {
    use std::fmt::Write as _;
    let mut text = "version = 1\nrepository = \"01K9ZQBF5628NEHV0HKGX7E3TC\"\n[[site]]\nname = \"a\"\n".to_owned();
    for n in 0..200 {
        let names = if n % 3 == 0 { "\"*/x\"".to_owned() } else { format!("[\"t{n}/**\", \"u{n}/*\"]") };
        let level = ["internal", "restricted"][n % 2];
        let to = if n % 5 == 0 { "to = \"a\"\n" } else { "" };
        writeln!(
            text,
            "[[rule]]\nverdict = \"allow\"\nnames = {names}\nsensitivity-at-least = \"{level}\"\n{to}why = \"{n}\""
        )
        .unwrap();
        if n % 3 == 0 {
            writeln!(text, "tenant = \"t{n}\"").unwrap();
        }
    }
    let policy = PolicyRules::read(&text).unwrap();
    for n in 0..200 {
        let tenant = labels(&format!("sensitivity=secret tenant=t{n}"));
        let name: Name = if n % 3 == 0 { "any/x".parse().unwrap() } else { format!("u{n}/y").parse().unwrap() };
        let question = Question {
            agent: None,
            caller: None,
            from: None,
            to: Some("a"),
            name: &name,
            labels: &tenant,
            route: Route::Node,
        };
        assert!(
            matches!(policy.rule_on(&question).basis, Basis::Rule { why, .. } if why == n.to_string()),
            "{n}: {name}"
        );
    }
}
