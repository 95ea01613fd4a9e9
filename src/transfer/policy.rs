//! Signed policies: a text, its signature as the last line, and its rules once the signature is verified.
//!
//! The signature is a comment of the text: `# signature: HEX`, over all lines before it. So the file stays readable
//! TOML.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::identity::{Context, Credentials, PolicyKey, Signature};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::policy::{Basis, LocalCaller, PolicyRules, Question, Route, Ruling, Verdict};
use crate::repository::log::{Declassified, PolicyMark};
use crate::repository::{Access, Destination, Guard, PolicyText};
use crate::tree::{Readers, make_private_folder, replace_file};

/// Beginning of the line that holds the signature.
const SIGNATURE: &str = "# signature: ";
/// Time after which a signature is verified again: its certificate may have expired or been revoked.
const VERIFIED_FOR: Duration = Duration::from_mins(1);
/// Maximum number of declassifications whose verification is remembered.
const DECLASSIFICATIONS_MAX: usize = 1 << 14;
/// Log lines about policies that cannot be used.
static UNUSABLE_POLICY: LogLimit = LogLimit::new();
/// Log lines about invalid declassifications, which anyone who may write to the store can commit.
static INVALID_DECLASSIFICATIONS: LogLimit = LogLimit::new();

/// Signs the policy `text` with `key`; replaces an existing signature.
///
/// # Errors
/// Usage, if it is not a policy; else as [`PolicyKey::sign`].
pub fn sign(text: &str, key: &PolicyKey) -> Result<String> {
    // Only the last line is a signature: such a comment further up is the author's.
    let last = text.trim_end().rfind('\n').map_or(0, |at| at + 1);
    let unsigned = if text[last..].starts_with(SIGNATURE) { &text[..last] } else { text };
    PolicyRules::read(unsigned)?;
    let unsigned = format!("{}\n", unsigned.trim_end());
    let signature = key.sign(Context::Policy, unsigned.as_bytes())?;
    Ok(format!("{unsigned}{SIGNATURE}{signature}\n"))
}

/// Signed text, and its signature.
///
/// # Errors
/// Denied, if it has none; damaged, if it is malformed.
fn split(bytes: &[u8]) -> Result<(&str, Signature)> {
    let text = std::str::from_utf8(bytes).map_err(|source| Error::damaged("policy is not UTF-8").source(source))?;
    let unsigned = || {
        Error::denied("policy is not signed").help(
            "sign it: towline policy sign FILE --key DIR; the key is that of \
                                                    `towline identity issue-policy`",
        )
    };
    let at = text.rfind(&format!("\n{SIGNATURE}")).ok_or_else(unsigned)? + 1;
    let (text, line) = text.split_at(at);
    let written = line.trim_start_matches(SIGNATURE);
    let (hex, rest) = written.split_once('\n').unwrap_or((written, ""));
    if !rest.is_empty() {
        return Err(Error::damaged("policy has text after its signature")
            .help("remove that text: only the text before the signature is signed"));
    }
    Ok((text, hex.trim_end().parse()?))
}

/// Signed policies, as read by a machine with a certificate. It is also the guard of its repositories.
#[derive(Debug)]
pub struct Policies {
    credentials: Option<Credentials>,
    /// Folder in which the highest version of each repository's policy is remembered.
    seen: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Rules of the policies in use. The text of one repository never stands for another's, nor one version for another.
    parsed: HashMap<(RepositoryId, PolicyMark), Parsed>,
    highest: HashMap<RepositoryId, VerifiedVersion>,
    /// Declassifications that were verified, by digest: whether they are valid, and when it was found. A request may look at many.
    declassifications: HashMap<blake3::Hash, (bool, Timestamp)>,
}

#[derive(Clone, Debug)]
struct Parsed {
    rules: Arc<PolicyRules>,
    /// Time when the signature was verified last; none if it is no longer valid.
    verified: Option<Timestamp>,
}

/// Newest policy of a repository that this machine verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct VerifiedVersion {
    /// Its version; 0 if none was seen.
    version: u64,
    /// Digest of its text, if known.
    digest: Option<[u8; 32]>,
}

/// Status of a repository's policy on this machine.
#[derive(Debug)]
pub(super) enum PolicyStatus {
    /// It is verified.
    InForce(Arc<PolicyRules>),
    /// It was verified before and no longer is: the certificate of its key has expired, for example. Its rules still bind content
    /// without labels, and content with labels stays.
    Lapsed(Arc<PolicyRules>),
    /// There is none that can be used, and this machine never saw one: content with labels stays.
    Unknown,
    /// This machine saw one before, and what is there now cannot be read or verified: nothing moves.
    Lost,
}

impl Policies {
    /// Policies that `credentials` trust; without credentials none is trusted, and content with labels stays. The
    /// highest version of each is remembered in the folder `seen`.
    #[must_use]
    pub fn new(credentials: Option<Credentials>, seen: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self { credentials, seen, state: Mutex::default() })
    }

    /// Identity of this machine.
    #[must_use]
    pub fn own(&self) -> Option<Identity> {
        self.credentials.as_ref().map(Credentials::identity)
    }

    /// Rules of `policy` of the repository `id`, if its signature is valid.
    ///
    /// # Errors
    /// Denied, if it is not signed by an authorised key, or this machine has no certificate; damaged, if it is for
    /// another repository or version than the log says, or malformed.
    pub fn rules(&self, id: RepositoryId, policy: &PolicyText) -> Result<Arc<PolicyRules>> {
        let Some(credentials) = &self.credentials else { return Err(no_certificate()) };
        let now = credentials.clock().now();
        let known = self.parsed(id, policy);
        if let Some(Parsed { rules, verified: Some(at) }) = &known
            && now.since(*at) < VERIFIED_FOR
        {
            return Ok(Arc::clone(rules));
        }
        let text = verified_text(credentials, &policy.bytes)?;
        let rules = match known {
            Some(known) => known.rules,
            None => Arc::new(PolicyRules::read(text)?),
        };
        if rules.repository() != id || rules.version() != policy.mark.version {
            return Err(Error::damaged("policy is for another repository or version")
                .expected(format!("{id}, version {}", policy.mark.version))
                .got(format!("{}, version {}", rules.repository(), rules.version())));
        }
        self.remember(id, policy.mark);
        self.keep(id, policy, Parsed { rules: Arc::clone(&rules), verified: Some(now) });
        Ok(rules)
    }

    /// Standing of the policy of the repository `id` on this machine. `policy` is none if there is none, or it cannot be read.
    pub(super) fn policy_status(&self, id: RepositoryId, policy: Option<&PolicyText>) -> PolicyStatus {
        match policy.map(|policy| self.rules(id, policy)) {
            Some(Ok(rules)) => return PolicyStatus::InForce(rules),
            // A machine without a certificate verifies no policy, which is no news with each name.
            Some(Err(error)) if self.credentials.is_none() => tracing::debug!("cannot use the policy: {error:?}"),
            Some(Err(error)) => {
                if let Some(kept_back) = UNUSABLE_POLICY.may() {
                    tracing::warn!(kept_back, "cannot use the policy: {error:?}");
                }
            }
            None => {}
        }
        if self.highest(id).version == 0 {
            return PolicyStatus::Unknown;
        }
        match policy.and_then(|policy| self.lapsed(id, policy)) {
            Some(rules) => PolicyStatus::Lapsed(rules),
            None => PolicyStatus::Lost,
        }
    }

    /// Rules of `policy`, if it is the one that this machine verified last, whatever its signature is worth now.
    fn lapsed(&self, id: RepositoryId, policy: &PolicyText) -> Option<Arc<PolicyRules>> {
        if self.highest(id).digest != Some(policy.mark.digest) {
            return None;
        }
        if let Some(known) = self.parsed(id, policy) {
            return Some(known.rules);
        }
        let (text, _) = split(&policy.bytes).ok()?;
        let rules = Arc::new(PolicyRules::read(text).ok()?);
        self.keep(id, policy, Parsed { rules: Arc::clone(&rules), verified: None });
        Some(rules)
    }

    fn parsed(&self, id: RepositoryId, policy: &PolicyText) -> Option<Parsed> {
        self.state().parsed.get(&(id, policy.mark)).cloned()
    }

    /// Keeps the rules of the newest policy of each repository.
    fn keep(&self, id: RepositoryId, policy: &PolicyText, parsed: Parsed) {
        let mut state = self.state();
        state.parsed.retain(|(other, _), _| *other != id);
        state.parsed.insert((id, policy.mark), parsed);
    }

    /// Rules of a signed policy that is in no repository yet.
    ///
    /// # Errors
    /// As [`Policies::rules`].
    pub fn read(&self, bytes: &[u8]) -> Result<PolicyRules> {
        match &self.credentials {
            Some(credentials) => PolicyRules::read(verified_text(credentials, bytes)?),
            None => Err(no_certificate()),
        }
    }

    /// Remembers that this was the policy of a repository. If the folder cannot be written, only for the life
    /// of the process: later processes start as on a fresh machine.
    fn remember(&self, id: RepositoryId, mark: PolicyMark) {
        let (before, seen) = (self.highest(id), VerifiedVersion { version: mark.version, digest: Some(mark.digest) });
        if before.version > seen.version || before == seen {
            return;
        }
        let write = |folder: &PathBuf| {
            make_private_folder(folder)?;
            if remembered(folder, id).is_some_and(|other| other.version > seen.version) {
                return Ok(());
            }
            let digest = blake3::Hash::from_bytes(mark.digest).to_hex();
            replace_file(&folder.join(id.to_string()), &format!("{} {digest}\n", mark.version), Readers::Owner)
        };
        if let Some(Err(error)) = self.seen.as_ref().map(write) {
            tracing::warn!("cannot store the seen version of the policy on this machine: {error:?}");
        }
        self.know(id, seen);
    }

    /// Newest policy that this machine ever verified.
    fn highest(&self, id: RepositoryId) -> VerifiedVersion {
        if let Some(seen) = self.state().highest.get(&id) {
            return *seen;
        }
        let seen = self.seen.as_ref().and_then(|folder| remembered(folder, id)).unwrap_or_default();
        self.know(id, seen);
        seen
    }

    /// Peers are told of its version from now on, and heard about later ones.
    fn know(&self, id: RepositoryId, seen: VerifiedVersion) {
        self.state().highest.insert(id, seen);
        if let Some(credentials) = &self.credentials {
            credentials.versions().record_version(id, seen.version);
        }
    }

    /// Listens to what peers tell of the policy of the repository `id`.
    pub(super) fn watch(&self, id: RepositoryId) {
        self.highest(id);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Policy that a process of this machine wrote last.
fn remembered(folder: &Path, id: RepositoryId) -> Option<VerifiedVersion> {
    let text = std::fs::read_to_string(folder.join(id.to_string())).ok()?;
    let mut parts = text.split_whitespace();
    let version = parts.next()?.parse().ok()?;
    let digest = parts.next().and_then(|hex| blake3::Hash::from_hex(hex).ok()).map(|digest| *digest.as_bytes());
    Some(VerifiedVersion { version, digest })
}

fn no_certificate() -> Error {
    Error::denied("this machine has no certificate, so it cannot verify the policy")
        .help("towline identity issue SITE/AGENT --to /etc/towline/identity")
}

/// Text of a policy, whose signature is valid now.
fn verified_text<'p>(credentials: &Credentials, bytes: &'p [u8]) -> Result<&'p str> {
    let (text, signature) = split(bytes)?;
    credentials.trusted().verify(&signature, Context::Policy, text.as_bytes(), credentials.clock().now())?;
    Ok(text)
}

impl Guard for Policies {
    fn rule_on(&self, policy: Option<&PolicyText>, access: &Access<'_>, caller: Option<&LocalCaller>) -> Ruling {
        let allow = Ruling { verdict: Verdict::Allow, basis: Basis::NoRule };
        let bound = access.labels.restrict();
        let own = self.own();
        if bound && own.is_none() {
            return Ruling::deny(Basis::UnknownSite);
        }
        let rules = match self.policy_status(access.repository, policy) {
            PolicyStatus::InForce(rules) => rules,
            PolicyStatus::Lapsed(rules) if !bound => rules,
            PolicyStatus::Unknown if !bound => return allow,
            PolicyStatus::Lapsed(_) | PolicyStatus::Unknown | PolicyStatus::Lost => {
                return Ruling::deny(Basis::NoPolicy);
            }
        };
        let receiver = match access.to {
            Destination::Agent(agent) => Some(agent),
            Destination::Here | Destination::Itself(_) | Destination::Repository(_) => own.as_ref(),
        };
        let receiver = receiver.and_then(|agent| rules.agent(agent));
        let agent = receiver.as_deref();
        let (to, route) = match access.to {
            Destination::Here => (agent.map(Identity::site), Route::Store),
            Destination::Itself(addresses) => (rules.site_of(addresses, access.repository), Route::Store),
            Destination::Repository(addresses) => (rules.site_of_destination(addresses), Route::Store),
            Destination::Agent(_) => (agent.map(Identity::site), Route::Unknown),
        };
        let question = Question { agent, caller, from: None, to, name: access.name, labels: access.labels, route };
        rules.rule_on_own(&question)
    }

    fn accepts_declassification(&self, repository: RepositoryId, name: &Name, declassified: &Declassified) -> bool {
        let Some(credentials) = &self.credentials else { return false };
        let statement = declassified.statement(&repository.to_string(), name);
        let key = blake3::Hasher::new()
            .update(&(statement.len() as u64).to_le_bytes())
            .update(&statement)
            .update(&declassified.signature)
            .finalize();
        let now = credentials.clock().now();
        if let Some((valid, found)) = self.state().declassifications.get(&key)
            && now.since(*found) < VERIFIED_FOR
        {
            return *valid;
        }
        let verified = Signature::decode(&declassified.signature)
            .and_then(|signature| credentials.trusted().verify(&signature, Context::Declassification, &statement, now));
        if let Err(error) = &verified
            && let Some(kept_back) = INVALID_DECLASSIFICATIONS.may()
        {
            tracing::warn!(kept_back, "declassification of {name} is invalid: {error:?}");
        }
        let known = &mut self.state().declassifications;
        if known.len() >= DECLASSIFICATIONS_MAX {
            known.clear();
        }
        known.insert(key, (verified.is_ok(), now));
        verified.is_ok()
    }

    fn announced_at(&self, repository: RepositoryId) -> Option<Instant> {
        self.credentials.as_ref()?.versions().announced(repository, Instant::now())
    }

    fn check_version(&self, repository: RepositoryId, mark: Option<PolicyMark>) -> Result<()> {
        let VerifiedVersion { version: highest, digest } = self.highest(repository);
        let version = mark.map_or(0, |mark| mark.version);
        if version == highest && digest.is_some() && mark.map(|mark| mark.digest) != digest {
            return Err(Error::denied("policy of the repository has the version of one that was seen before, and another text")
                .got(format!("version {version}"))
                .help("check who may write to the store; the authority can sign and set a later version (`towline policy set`)"));
        }
        if version >= highest {
            return Ok(());
        }
        Err(Error::denied("policy of the repository is older than one that was seen before")
            .expected(format!("version {highest} or later"))
            .got(if version == 0 { "none".to_owned() } else { format!("version {version}") })
            .help(
                "somebody replaced the log by an old one: check who may write to the store; the authority can sign and \
                   set a later version (`towline policy set`)",
            ))
    }
}

/// Folder for the versions of policies: `towline/policy` in the state folder of the service
/// (<https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html#RuntimeDirectory=>) or of the user.
#[must_use]
pub fn seen_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || folder("HOME").map(|home| home.join(".local/state"));
    let state = folder("STATE_DIRECTORY").or_else(|| folder("XDG_STATE_HOME")).or_else(home)?;
    Some(state.join("towline/policy"))
}

/// Guard of a command or library user on this machine, by the machine's certificate, if there is one.
///
/// # Errors
/// As [`machine`].
pub fn machine_guard() -> Result<Arc<Policies>> {
    Ok(Policies::new(machine(config_folder().as_deref())?, seen_folder()))
}

/// The user's configuration folder, in which the certificate of this machine for this user may lie.
#[must_use]
pub fn config_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || folder("HOME").map(|home| home.join(".config"));
    folder("XDG_CONFIG_HOME").or_else(home).map(|config| config.join("towline"))
}

/// Certificate of this machine: `/etc/towline/identity`, else `towline/identity` in the user's configuration. No flag
/// and no setting chooses it.
///
/// # Errors
/// Damaged, if there is one that cannot be used.
pub fn machine(config: Option<&Path>) -> Result<Option<Credentials>> {
    let places = [Some(PathBuf::from("/etc/towline/identity")), config.map(|config| config.join("identity"))];
    for folder in places.into_iter().flatten() {
        match Credentials::open(&folder, Arc::new(crate::clock::SystemClock)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // The node's own certificate belongs to its agent: for a user who may not read its key there is none.
            Err(error) if error.kind() == ErrorKind::Denied => tracing::debug!("certificate is not used: {error:?}"),
            opened => return opened.map(Some),
        }
    }
    Ok(None)
}
