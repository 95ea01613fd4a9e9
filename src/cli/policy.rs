//! `towline policy` and `towline declassify`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::args::PolicyVerb;
use super::label::described;
use super::output::printable;
use super::render::counted;
use super::verbs::Context;
use crate::audit::Action;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::policy::{
    CaseReport, Cases, CheckedCase, Labels, LocalCaller, POLICY_LEN_MAX, PolicyRules, Question, Route, Ruling,
    Sensitivity, UntestedRule, Verdict,
};
use crate::repository::Repository;
use crate::repository::log::State;
use crate::selector::Selector;
use crate::transfer::identity::{Context as Signing, PolicyKey};
use crate::transfer::policy::{machine_guard, sign};
use crate::tree::read_text_file;
use crate::tree::{Readers, replace_file};

/// Labels that a declassification asks for.
pub(super) struct Wanted {
    pub(super) sensitivity: Sensitivity,
    pub(super) residency: Option<String>,
    pub(super) reason: String,
}

/// A policy.
#[derive(Serialize)]
struct Policy {
    version: u64,
    repository: String,
    sites: Vec<String>,
    rules: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// A ruling.
#[derive(Serialize)]
struct Explained {
    name: Name,
    to: String,
    labels: Labels,
    #[serde(flatten)]
    ruling: Ruling,
}

impl Context {
    /// Carries out `what`; says with which code to end.
    pub(super) async fn policy(&self, what: PolicyVerb) -> Result<u8> {
        match what {
            PolicyVerb::Test { file, policy } => return self.test_policy(&file, policy).await,
            PolicyVerb::Show => self.show_policy().await,
            PolicyVerb::Check { file } => {
                let rules =
                    PolicyRules::read(&read_text_file(&file, POLICY_LEN_MAX)?).map_err(|error| error.in_file(&file))?;
                self.output.answer(&told(&rules, None), |policy, _| summed(policy))
            }
            PolicyVerb::Sign { file, key, to } => {
                let signed = sign(&read_text_file(&file, POLICY_LEN_MAX)?, &PolicyKey::open(&key)?)
                    .map_err(|error| error.in_file(&file))?;
                let to = to.unwrap_or(file);
                replace_file(&to, &signed, Readers::All)?;
                let rules = PolicyRules::read(&signed)?;
                self.output
                    .report(&told(&rules, None), |policy, _| format!("signed {}\n{}", to.display(), summed(policy)))
            }
            PolicyVerb::Set { file, lock_out } => self.set_policy(&file, lock_out).await,
            PolicyVerb::Explain { name, to, agent, caller, caller_tenant, policy } => {
                let agent = agent.as_deref().map(agent_of).transpose()?;
                let caller = caller.map(|name| LocalCaller { name, tenant: caller_tenant });
                self.explain(name, to, (agent.as_ref(), caller.as_ref()), policy.as_deref()).await
            }
        }
        .map(|()| 0)
    }

    /// Decides the cases in `file`; says 1 if one is not decided as it expects.
    async fn test_policy(&self, file: &Path, policy: Option<PathBuf>) -> Result<u8> {
        let cases = Cases::read(&read_text_file(file, POLICY_LEN_MAX)?).map_err(|error| error.in_file(file))?;
        let beside = |name: &str| file.parent().unwrap_or(Path::new("")).join(name);
        let rules: Arc<PolicyRules> = match policy.or_else(|| cases.policy().map(beside)) {
            Some(policy) => read_rules(&policy)?.into(),
            None => {
                let repository = self.open().await?;
                rules_in_force(&repository, &*repository.state().await?).await?
            }
        };
        let report = cases.check(&rules);
        self.output.answer(&report, |report, _| tested(report, file))?;
        Ok(u8::from(report.failed > 0))
    }

    async fn show_policy(&self) -> Result<()> {
        let repository = self.open().await?;
        let state = repository.state().await?;
        let Some(policy) = repository.policy_of(&state).await? else {
            return Err(Error::not_found("the repository has no policy").at(repository.store()).help(
                "write one (docs/policy.md), then: towline policy sign FILE --key DIR; towline policy set FILE",
            ));
        };
        let rules = machine_guard()?.rules(repository.id(), &policy)?;
        let text = String::from_utf8_lossy(&policy.bytes).into_owned();
        self.output.answer(&told(&rules, Some(text)), |policy, _| policy.text.clone().unwrap_or_default())
    }

    async fn set_policy(&self, file: &Path, lock_out: bool) -> Result<()> {
        let repository = self.open().await?;
        let text = read_text_file(file, POLICY_LEN_MAX)?;
        let guard = machine_guard()?;
        let rules = guard.read(text.as_bytes()).map_err(|error| error.in_file(file))?;
        if rules.repository() != repository.id() {
            return Err(Error::usage("policy is for another repository")
                .at(file.display())
                .expected(repository.id())
                .got(rules.repository()));
        }
        let own = guard.own();
        if !lock_out && !own.as_ref().is_some_and(|own| rules.admits(own)) {
            return Err(Error::conflict("policy lets this machine read nothing")
                .at(file.display())
                .got(own.map_or_else(|| "a machine without certificate".to_owned(), |own| own.to_string()))
                .help("add a rule that allows it, or give --lock-out; a later version can always be signed and set"));
        }
        let recorded = self.record_policy(&repository).await?;
        let set = repository.set_policy(rules.version(), text.into_bytes().into()).await;
        recorded.end(set, |()| 0).await?;
        self.output.report(&told(&rules, None), |policy, _| format!("in force: {}", summed(policy)))
    }

    async fn explain(
        &self,
        name: Selector,
        to: String,
        (agent, caller): (Option<&Identity>, Option<&LocalCaller>),
        file: Option<&Path>,
    ) -> Result<()> {
        let repository = self.open().await?;
        // A name may be absent: the rules apply to it all the same.
        let name = match name {
            Selector::Name(name) => name,
            step @ Selector::Step { .. } => self.resolve(&repository, &step).await?,
        };
        let state = repository.state().await?;
        let rules = match file {
            Some(file) => read_rules(file)?.into(),
            None => rules_in_force(&repository, &state).await?,
        };
        let labels = repository.labels_in(&state, &name, state.refs.get(&name).map(|value| &value.manifest));
        let any = Identity::new(&to, "any")?;
        let question = Question {
            agent: Some(agent.unwrap_or(&any)),
            caller,
            from: None,
            to: Some(&to),
            name: &name,
            labels: &labels,
            route: Route::Unknown,
        };
        let ruling = rules.rule_on(&question);
        let over_store = rules.rule_on(&Question { route: Route::Store, ..question });
        if !state.refs.contains_key(&name) {
            self.output.remark("the repository has no such name: this is the answer for a name without content");
        }
        if rules.sites().get(&to).is_none() {
            self.output.remark(&format!("the policy does not describe the site {}", printable(&to)));
        }
        if over_store.verdict != ruling.verdict {
            let may = if over_store.verdict == Verdict::Allow { "may" } else { "may not" };
            self.output.remark(&format!("over the store of the site itself it {may}: {}", over_store.basis));
        }
        let explained = Explained { name, to, labels, ruling };
        self.output.answer(&explained, |explained, _| {
            let Explained { name, to, labels, ruling } = explained;
            let labels = if labels.is_empty() { "no labels".to_owned() } else { labels.to_string() };
            let may = if ruling.verdict == Verdict::Allow { "may go" } else { "may not go" };
            format!("{name} {may} to {to}: {}\n  {labels}\n", ruling.basis)
        })
    }

    pub(super) async fn declassify(&self, name: &Name, wanted: Wanted, key: &Path) -> Result<()> {
        let repository = self.open().await?;
        let key = PolicyKey::open(key)?;
        let now = repository.labels(name).await?.labels;
        let mut labels = Labels::default().with("sensitivity", wanted.sensitivity.word())?;
        for (label, value) in now.pairs() {
            let residency = if label == "residency" { wanted.residency.as_deref() } else { None };
            match residency {
                _ if label == "sensitivity" => {}
                Some("any") => {}
                Some(list) => labels = labels.with(label, list)?,
                None => labels = labels.with(label, &value)?,
            }
        }
        let mut declassified = repository.plan_declassification(name, labels, &wanted.reason).await?;
        let statement = declassified.statement(&repository.id().to_string(), name);
        declassified.signature = key.sign(Signing::Declassification, &statement)?.encode()?;
        let recorded = self.record(Action::Declassify, &[name.to_string()], &repository, None).await?;
        let labelled = recorded.end(repository.declassify(name, declassified).await, |_| 0).await?;
        self.output.report(&labelled, |labelled, _| described(labelled))
    }
}

pub(super) async fn rules_in_force(repository: &Repository, state: &State) -> Result<Arc<PolicyRules>> {
    let policy = repository.policy_of(state).await?.ok_or_else(|| {
        Error::not_found("the repository has no policy").help("give --policy FILE to ask one that is not set")
    })?;
    machine_guard()?.rules(repository.id(), &policy)
}

fn read_rules(file: &Path) -> Result<PolicyRules> {
    PolicyRules::read(&read_text_file(file, POLICY_LEN_MAX)?).map_err(|error| error.in_file(file))
}

/// The cases that failed, the rules that no case is about, and the numbers of both kinds of cases.
fn tested(report: &CaseReport, file: &Path) -> String {
    let failed = report.cases.iter().filter(|case| !case.passed).map(|case| {
        let CheckedCase { line, name, to, expected, rule, ruling, .. } = case;
        let by = rule.as_ref().map_or_else(String::new, |rule| format!(" by \"{rule}\""));
        let (file, expected, verdict) = (file.display(), expected.word(), ruling.verdict.word());
        format!(
            "FAIL {file}, line {line}: {name} to {to}: expected {expected}{by}\n     got {verdict} by {}\n",
            ruling.basis
        )
    });
    let untested = report.untested.iter();
    let untested =
        untested.map(|UntestedRule { line, why }| format!("no case is decided by the rule at line {line}: {why}\n"));
    let numbers = format!("{} passed, {} failed\n", report.passed, report.failed);
    failed.chain(untested).chain([numbers]).collect()
}

fn agent_of(text: &str) -> Result<Identity> {
    let parts = text.split_once('/');
    let (site, agent) = parts.ok_or_else(|| Error::usage("agent is malformed").expected("SITE/AGENT").got(text))?;
    Identity::new(site, agent)
}

/// A policy, for output.
fn told(rules: &PolicyRules, text: Option<String>) -> Policy {
    Policy {
        version: rules.version(),
        repository: rules.repository().to_string(),
        sites: rules.sites().keys().cloned().collect(),
        rules: rules.rules(),
        text,
    }
}

fn summed(policy: &Policy) -> String {
    let Policy { version, repository, sites, rules, .. } = policy;
    format!(
        "version {version} for repository {repository}: {}, sites {}\n",
        counted(*rules as u64, "rule"),
        sites.join(", ")
    )
}
