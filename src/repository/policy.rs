//! The policy in a repository: a readable text with its signature, one object for each version. The log names the one
//! in force.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::layout::Numbered;
use super::log::{Action, PolicyMark, State};
use super::{Repository, objects};
use crate::error::{Error, Result};
use crate::policy::POLICY_LEN_MAX;

/// Policy object: checked against the log, its signature not yet verified.
#[derive(Debug)]
pub struct PolicyText {
    /// Version and digest in the log.
    pub mark: PolicyMark,
    /// Text with its signature.
    pub bytes: Bytes,
}

/// Policy that was read last.
#[derive(Debug, Default)]
pub(super) struct PolicyCache(Mutex<Option<Arc<PolicyText>>>);

impl Repository {
    /// Policy in force in `state`.
    ///
    /// # Errors
    /// Not found or damaged, if the log names one that is missing or different; else errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn policy_of(&self, state: &State) -> Result<Option<Arc<PolicyText>>> {
        let Some(mark) = state.policy else { return Ok(None) };
        let cached = self.shared.policy.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(policy) = cached.filter(|policy| policy.mark == mark) {
            return Ok(Some(policy));
        }
        let key = Numbered::Policy.key(mark.version);
        let objects = &**self.store().objects();
        let len = objects::len(objects, &key).await?;
        if len > POLICY_LEN_MAX {
            return Err(Error::damaged("policy is too long").at(key).expected(POLICY_LEN_MAX).got(len));
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap_or_default()];
        objects::read_range(objects, &key, 0, &mut bytes).await?;
        let digest = *blake3::hash(&bytes).as_bytes();
        if digest != mark.digest {
            return Err(Error::damaged("policy is not the one that the log names").at(key));
        }
        let policy = Arc::new(PolicyText { mark, bytes: bytes.into() });
        *self.shared.policy.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&policy));
        Ok(Some(policy))
    }

    /// Puts a policy in force: `bytes` with its signature, with a version above all earlier ones. The caller has
    /// verified it.
    ///
    /// # Errors
    /// Conflict, if another policy of this or a higher version is in force already, or another text has this version. The policy that is
    /// in force may be set again.
    ///
    /// # Cancel safety
    /// Not safe: the commit may have happened.
    pub async fn set_policy(&self, version: u64, bytes: Bytes) -> Result<()> {
        let mark = PolicyMark { version, digest: *blake3::hash(&bytes).as_bytes() };
        let state = self.state().await?;
        if state.policy == Some(mark) {
            return Ok(());
        }
        self.check_newer(&state, version)?;
        let (objects, key) = (&**self.store().objects(), Numbered::Policy.key(version));
        let created = objects::retry(|| objects::create(objects, &key, bytes.clone())).await?;
        if created != objects::Created::Yes {
            let len = objects::len(objects, &key).await?;
            let mut found = vec![0; usize::try_from(len.min(POLICY_LEN_MAX)).unwrap_or_default()];
            objects::read_range(objects, &key, 0, &mut found).await?;
            if found != bytes {
                return Err(Error::conflict("another policy of this version exists already")
                    .at(key)
                    .help("give yours a higher version, sign it again, then set it"));
            }
        }
        self.log()
            .commit(None, |state| {
                self.check_newer(state, version)?;
                Ok(vec![Action::SetPolicy(mark)])
            })
            .await?;
        Ok(())
    }

    fn check_newer(&self, state: &State, version: u64) -> Result<()> {
        match state.policy {
            Some(current) if current.version >= version => Err(Error::conflict(
                "policy is not newer than the one in force",
            )
            .at(self.store())
            .expected(format!("a version above {}", current.version))
            .got(version)
            .help("somebody else set one: check it (`towline policy show`), then sign yours with a higher version")),
            _ => Ok(()),
        }
    }
}
