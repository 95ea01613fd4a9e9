//! Who may talk to whom.

mod name;

pub use self::name::Identity;
