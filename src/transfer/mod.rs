//! Agent to agent: who they are ([`identity`]), how they talk ([`protocol`]).

mod holdings;
pub mod identity;
pub mod protocol;

pub use self::holdings::Holdings;
