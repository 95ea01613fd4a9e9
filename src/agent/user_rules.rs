//! Rules of what jobs of some users may ask about, for schedulers that know users.

use std::collections::BTreeSet;

use crate::name::Name;
use crate::pattern::Patterns;

/// User that stands for all.
pub(super) const ALL: &str = "*";

/// Names about which jobs of some users may ask.
#[derive(Clone, Debug)]
pub struct UserRule {
    /// Users, or `*` for all.
    pub users: BTreeSet<String>,
    /// Names.
    pub names: Patterns,
}

/// Rules; without one, nobody may ask.
#[derive(Clone, Debug, Default)]
pub struct UserRules(pub Vec<UserRule>);

impl UserRules {
    /// True if jobs of `user` may ask about the name. A user who is not known is only one of all.
    pub(super) fn allow(&self, user: Option<&str>, name: &Name) -> bool {
        self.0.iter().any(|rule| {
            let known = user.is_some_and(|user| rule.users.contains(user));
            (known || rule.users.contains(ALL)) && rule.names.take(name.as_str())
        })
    }
}
