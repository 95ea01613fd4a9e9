//! Agent to agent: who they are ([`identity`]), how they talk ([`protocol`]), what carries it ([`quic`], [`tcp`]; [`local`] between the
//! processes of a node), how one asks another to do something ([`calls`]), which of them there are ([`peers`]), and who gives what to
//! whom ([`exchange`]).

mod asking;
mod byte_counters;
pub mod calls;
mod driver;
pub mod exchange;
mod gate;
mod guarded;
mod holdings;
pub mod identity;
pub mod ledger;
pub mod local;
mod log_limit;
pub mod peers;
pub mod protocol;
pub mod quic;
pub mod tcp;
mod transport;

pub use self::byte_counters::ByteCounters;
pub use self::driver::{Client, Fetching, Received, Reply};
pub use self::gate::{Admission, Gate, GateStat, Pass};
pub use self::holdings::{Ahead, Holdings, Seat};
pub use self::transport::Dial;
pub(crate) use self::transport::{GOOD_WINDOW, not_bound};
