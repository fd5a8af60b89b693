//! `blockd clone`.

use blockd_api::v1::{CloneVolumesRequest, Volume};
use blockd_media::error::Error;
use serde::Serialize;

use super::attach::FrontEndArguments;
use super::labels::LabelArguments;
use super::{Context, amount, answers, names, size_argument};

/// The place of the number in a name template.
const NUMBER: &str = "{}";

/// Make volumes that begin as a snapshot's content
///
/// Nothing is copied: what they have in common takes its space once, until one of them is written.
/// The snapshot can be deleted at any time. A volume that is there already, made from this snapshot
/// with this size, is left as it is, but gets the labels that are named; of the snapshot's labels
/// it has none. With --count as many are made, numbered from 1. With --attach they are also made
/// reachable, as by `blockd attach`. If a part of it fails, nothing is changed; after a crash of
/// the daemon some may be there: repeat the command.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd clone data-monday test\n  \
                  blockd clone golden vm1 --size 40G --attach\n  \
                  blockd clone golden --count 100 --name-template 'vm-{}' --nbd")]
pub(crate) struct Clone {
    /// The snapshot, NAME or POOL/NAME
    pub snapshot: String,

    /// The new volume's name: 1 to 128 bytes without '/'
    #[arg(required_unless_present = "name_template")]
    pub name: Option<String>,

    /// Make this many, at most 1000, named by --name-template
    #[arg(long, value_name = "N", requires = "name_template", conflicts_with = "name",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: Option<u32>,

    /// Their names, with {} in place of the number: vm-{} for vm-1, vm-2 and so on
    #[arg(long, value_name = "TEMPLATE", requires = "count", conflicts_with = "name")]
    pub name_template: Option<String>,

    /// How much clients see, no less than of the snapshot [default: as much]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: Option<String>,

    /// Attach them too, as do --ublk and --nbd
    #[arg(long)]
    pub attach: bool,

    #[command(flatten)]
    pub front_end: FrontEndArguments,

    #[command(flatten)]
    pub labels: LabelArguments,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The output of `--json` for one.
#[derive(Debug, Serialize)]
struct Cloned {
    changed: bool,
    attached: bool,
    volume: Volume,
}

/// The output of `--json` for several.
#[derive(Debug, Serialize)]
struct Several {
    changed: bool,
    created: u32,
    attached: u32,
    volumes: Vec<Volume>,
}

impl Clone {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        let mut new = self.names()?;
        names::place(&mut self.pool, [&mut self.snapshot].into_iter().chain(&mut new))?;
        new.iter().try_for_each(|name| names::check_visible(name))?;
        let size = self.size.as_deref().map(|text| size_argument("size", text)).transpose()?;
        if size == Some(0) {
            return Err(Error::invalid("size", 0, "more than 0"));
        }
        let attaches = self.attach || self.front_end.is_any();
        let attach = self.front_end.request(String::new(), String::new(), false);
        let request = CloneVolumesRequest {
            pool: self.pool,
            snapshot: self.snapshot.clone(),
            names: new,
            each_bytes: size.unwrap_or(0),
            labels: self.labels.pairs()?,
            attach: attaches.then_some(attach),
        };
        let answer = context.client().await?.clone_volumes(request).await?;
        let (changed, created, attached) = (answer.changed, answer.created, answer.attached);
        let mut volumes = answer.volumes;
        if self.count.is_some() {
            let done = Several { changed, created, attached, volumes };
            return context.output.either(&done, || several(&done, &self.snapshot, context));
        }
        let volume = answers::volume(volumes.pop())?;
        let done = Cloned { changed, attached: attached > 0, volume };
        context.output.either(&done, || one(&done, created > 0, context))
    }

    fn names(&self) -> Result<Vec<String>, Error> {
        let Some(template) = &self.name_template else {
            return Ok(self.name.iter().cloned().collect());
        };
        if !template.contains(NUMBER) {
            return Err(Error::invalid("name-template", template, "a name with {} in it"));
        }
        let numbers = 1..=self.count.unwrap_or(1);
        Ok(numbers.map(|number| template.replace(NUMBER, &number.to_string())).collect())
    }
}

fn one(done: &Cloned, is_new: bool, context: &Context) -> String {
    let volume = &done.volume;
    let from = match volume.origin.as_str() {
        "" => "a snapshot that is gone",
        origin => origin,
    };
    let size = context.output.size(amount(volume.size_bytes));
    let how = if is_new { "cloned" } else { "was there already," };
    let place = if done.attached { format!("\n{}", answers::place(volume)) } else { String::new() };
    format!("{}: {how} from {from}, {size}{place}\n", volume.name)
}

fn several(done: &Several, snapshot: &str, context: &Context) -> String {
    let Several { created, attached, volumes, .. } = done;
    let size = volumes.first().map_or(0, |volume| amount(volume.size_bytes));
    let size = context.output.size(size);
    let mut text = format!("{created} cloned from {snapshot}, {size} each");
    let there = volumes.len() as u64 - u64::from(*created);
    if there > 0 {
        text.push_str(&format!("; {there} were there already"));
    }
    text.push('\n');
    if *attached > 0 {
        let places = volumes.iter().filter(|volume| volume.attached);
        places.for_each(|one| text.push_str(&format!("{} {}\n", one.name, answers::place(one))));
    }
    text
}
