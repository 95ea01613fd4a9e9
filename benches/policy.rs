//! How long does a ruling take under 10,000 rules? The bound is 10 us, whichever rule decides.

use std::fmt::Write as _;

use criterion::{Criterion, criterion_group, criterion_main};
use towline::identity::Identity;
use towline::name::Name;
use towline::policy::{Labels, PolicyRules, Question, Route};

const RULES: usize = 10_000;

/// A policy in which each team has rules for its own names, and some are for all.
fn policy() -> PolicyRules {
    let mut text = "version = 1\nrepository = '01K9ZQBF5628NEHV0HKGX7E3TC'\n".to_owned();
    for site in ["home", "cloud"] {
        writeln!(text, "[[site]]\nname = '{site}'\njurisdiction = 'DE'").expect("write to a string");
    }
    for n in 0..RULES {
        let names = if n % 1000 == 999 { format!("**/special-{n}/*") } else { format!("team-{n}/**") };
        let level = if n % 2 == 0 { "internal" } else { "restricted" };
        writeln!(text, "[[rule]]\nverdict = 'allow'\nnames = '{names}'\nsensitivity-at-most = '{level}'\nwhy = '{n}'")
            .expect("write to a string");
    }
    PolicyRules::read(&text).expect("a policy")
}

fn rulings(bench: &mut Criterion) {
    let policy = policy();
    let agent = Identity::new("cloud", "a").expect("an identity");
    let labels = Labels::default().with("residency", "DE").and_then(|labels| labels.with("sensitivity", "internal"));
    let labels = labels.expect("two labels");
    for (what, name) in [("the first rule", "team-0/a/b"), ("the last rule", "team-9998/a/b"), ("no rule", "nobody/a")]
    {
        let name: Name = name.parse().expect("a name");
        let (agent, labels) = (Some(&agent), &labels);
        let question = Question {
            agent,
            caller: None,
            from: Some("home"),
            to: Some("cloud"),
            name: &name,
            labels,
            route: Route::Unknown,
        };
        bench.bench_function(&format!("ruling by {what} of {RULES}"), |bencher| {
            bencher.iter(|| policy.rule_on(std::hint::black_box(&question)));
        });
    }
}

criterion_group!(benches, rulings);
criterion_main!(benches);
