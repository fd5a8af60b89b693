//! `blockd recover`.

use blockd_api::v1::{RecoverDevicesRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, names};

/// Serve block devices again that are not served
///
/// The daemon does this by itself when it starts. What failed then can be tried again, once its
/// cause is gone. Devices that are served are left as they are.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd recover\n  blockd recover data")]
pub(crate) struct Recover {
    /// Only this volume, NAME or POOL/NAME
    #[arg(default_value = "", hide_default_value = true)]
    pub name: String,

    /// The pool that it is in, or only volumes of this pool
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Recovered {
    changed: bool,
    volumes: Vec<Volume>,
}

impl Recover {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name])?;
        let mut client = context.client().await?;
        let request = RecoverDevicesRequest { name: self.name, pool: self.pool };
        let answer = client.recover_devices(request).await?;
        let recovered = Recovered { changed: answer.changed, volumes: answer.volumes };
        let text = || recovered.volumes.iter().map(line).collect::<Vec<_>>().concat();
        context.output.either(&recovered, text)?;
        match recovered.volumes.iter().find(|volume| !volume.device_problem.is_empty()) {
            None => Ok(()),
            Some(volume) => {
                let what = format!("volume {}", volume.name);
                Err(Error::in_use(what, format!("is not served: {}", volume.device_problem)))
            }
        }
    }
}

fn line(volume: &Volume) -> String {
    match volume.device_problem.as_str() {
        "" => format!("{}: {}\n", volume.name, volume.device_path),
        problem => format!("{}: not served: {problem}\n", volume.name),
    }
}
