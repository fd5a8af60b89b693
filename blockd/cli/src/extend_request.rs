//! `blockd extend-request`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use blockd_api::extend::{Extend, Form, Message, Refusal};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::{Context, size_argument};

/// Ask for more space for a volume, as data paths outside do
///
/// Speaks the extend protocol on a pool's extend socket, for tests and scripts. It is answered once
/// a quantum of the pool's space is reserved for the volume, or less where the volume can use no
/// more or no more is left, and waits while there is none for as long as --timeout says. The
/// protocol has no answer that says no: the daemon hangs up when there is no such volume.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    blockd extend-request --socket /run/blockd/extend.sock data 10G 4G 20M\n  \
    blockd extend-request --socket /run/blockd/extend.sock --shutdown")]
pub(crate) struct ExtendRequest {
    /// The pool's extend socket
    #[arg(long, required = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Close the pool in order, and with its only pool the daemon, and wait for that; root only
    #[arg(long, conflicts_with_all = ["name", "wait"])]
    pub shutdown: bool,

    /// Write the message's type as an ASCII digit, not as a number
    #[arg(long)]
    pub ascii: bool,

    /// Wait without limit, whatever --timeout says
    #[arg(long)]
    pub wait: bool,

    /// The volume
    #[arg(required_unless_present = "shutdown", requires = "metadata")]
    pub name: Option<String>,

    /// Bytes that its clients see, like 10G
    pub size: Option<String>,

    /// Bytes that it has been given so far
    pub current: Option<String>,

    /// Bytes of these that are the data path's metadata
    pub metadata: Option<String>,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Answered {
    /// False for a shutdown, which has no answer.
    answered: bool,
    /// The pool is closed.
    ended: bool,
    form: &'static str,
    waited_ms: u64,
}

impl ExtendRequest {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let form = if self.ascii { Form::Ascii } else { Form::Binary };
        let message = self.message(form)?;
        let bytes = message.encode().map_err(|refusal| self.refused(refusal))?;
        let path = self.socket.clone().unwrap_or_default();
        let clock = Clock::start();
        let limit = (!self.wait).then_some(context.global.timeout);
        let answer = Link { path, limit }.exchange(&bytes).await?;
        let waited_ms = u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.judge(answer.as_deref(), form)?;
        let answered = Answered {
            answered: !self.shutdown,
            ended: self.shutdown,
            form: if self.ascii { "ascii" } else { "binary" },
            waited_ms,
        };
        context.output.either(&answered, || match &self.name {
            Some(name) => format!("{name}: there is space\n"),
            None => "the pool is closed\n".to_owned(),
        })
    }

    fn message(&self, form: Form) -> Result<Message, Error> {
        let Some(name) = &self.name else { return Ok(Message::Shutdown(form)) };
        let size = |field, text: &Option<String>| {
            let bytes = size_argument(field, text.as_deref().unwrap_or("0"))?;
            Ok::<_, Error>(super::amount(bytes))
        };
        Ok(Message::Extend(Extend {
            form,
            name: name.clone().into_bytes(),
            virtual_size: size("size", &self.size)?,
            current_size: size("current", &self.current)?,
            metadata_size: size("metadata", &self.metadata)?,
        }))
    }

    fn refused(&self, refusal: Refusal) -> Error {
        let name = self.name.as_deref().unwrap_or_default();
        let allowed = match refusal {
            Refusal::EmbeddedNul(_) => "without NUL",
            _ => "1 to 254 bytes",
        };
        Error::invalid("name", name, allowed)
    }

    /// Whether this is how the exchange ends: `None` is the end of the connection.
    fn judge(&self, answer: Option<&[u8]>, form: Form) -> Result<(), Error> {
        let address = self.socket.clone().unwrap_or_default().display().to_string();
        let problem = match (self.shutdown, answer) {
            // The socket goes with the pool.
            (true, None) if !self.socket.as_ref().is_some_and(|path| path.exists()) => {
                return Ok(());
            }
            (true, None) => {
                "hung up, and the pool is not closed: the daemon's log says why".to_owned()
            }
            (false, Some([byte])) if *byte == form.answer() => return Ok(()),
            (_, Some(bytes)) => {
                format!("answered {}, which is not of this protocol", bytes.escape_ascii())
            }
            (false, None) => "hung up without an answer: its pool may have no such volume; the \
                              daemon's log says why"
                .to_owned(),
        };
        Err(Error::Unreachable { address, problem })
    }
}

/// The way to a daemon.
struct Link {
    path: PathBuf,
    limit: Option<Duration>,
}

impl Link {
    /// Says something and waits for one byte, or for the end.
    async fn exchange(&self, message: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let talk = async {
            let mut stream = UnixStream::connect(&self.path).await?;
            stream.write_all(message).await?;
            let mut answer = [0; 1];
            let length = stream.read(&mut answer).await?;
            Ok::<_, io::Error>((length > 0).then(|| answer.to_vec()))
        };
        let ended = match self.limit {
            None => talk.await,
            Some(limit) => match tokio::time::timeout(limit, talk).await {
                Ok(ended) => ended,
                Err(_) => return Err(self.failed(format!("gave no answer within {limit:?}"))),
            },
        };
        match ended {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(self.failed(error.to_string())),
            Ok(answer) => Ok(answer),
        }
    }

    fn failed(&self, problem: String) -> Error {
        Error::Unreachable { address: self.path.display().to_string(), problem }
    }
}
