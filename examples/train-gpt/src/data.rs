//! Text as bytes, split into training and validation parts, and cut into batches.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

/// The default corpus stops here: more than a short run reads, and quick to load.
const REGISTRY_LIMIT: usize = 4 << 20;
/// One part in this many is held out for validation.
const VALIDATION_PART: usize = 20;
/// The sequences of one evaluation are this many at most.
const VALIDATION_SEQUENCES: usize = 128;

/// A text, split into a training and a validation part.
pub struct Corpus {
    train: Vec<u8>,
    validation: Vec<u8>,
}

/// Sequences of tokens, and the token that follows each of them.
pub struct Batch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    context: usize,
}

impl Corpus {
    /// Read the text at `path`, or the Markdown files of the local cargo registry.
    ///
    /// # Errors
    ///
    /// Fails if there is no text, or too little of it for sequences of `context` tokens.
    pub fn load(path: Option<&Path>, context: usize) -> Result<Self> {
        let text = match path {
            Some(path) => {
                read_text(path).with_context(|| format!("cannot read {}", path.display()))?
            }
            None => read_registry()?,
        };
        Self::split(text, context)
    }

    /// Hold out the end of `text` for validation.
    ///
    /// # Errors
    ///
    /// Fails if a part is too short for sequences of `context` tokens.
    pub fn split(mut text: Vec<u8>, context: usize) -> Result<Self> {
        let validation = text.split_off(text.len() - text.len() / VALIDATION_PART);
        ensure!(
            // A sequence and the token after it.
            validation.len() > context && text.len() > context,
            "the text is too short: {} bytes to train on and {} to validate with, where a context \
             of {context} needs more than {context} of each",
            text.len(),
            validation.len(),
        );
        Ok(Self {
            train: text,
            validation,
        })
    }

    /// Bytes in the training and in the validation part.
    pub fn sizes(&self) -> (usize, usize) {
        (self.train.len(), self.validation.len())
    }

    /// A number that tells this text from another (64-bit FNV-1a).
    pub fn fingerprint(&self) -> u64 {
        self.train
            .iter()
            .chain(&self.validation)
            .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            })
    }

    /// Random sequences for the micro-batch with number `index`, counted from the start of the run.
    ///
    /// The batch is a function of the seed and of the index alone, so a resumed run sees exactly
    /// what an uninterrupted one would have.
    pub fn batch(&self, seed: u64, index: u64, sequences: usize, context: usize) -> Batch {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(index);
        let last = self.train.len() - context - 1;
        let starts = (0..sequences).map(|_| rng.random_range(0..=last));
        Batch::cut(&self.train, starts, context)
    }

    /// The sequences to validate with, evenly spread, in batches of up to `sequences`.
    pub fn validation(
        &self,
        sequences: usize,
        context: usize,
    ) -> impl ExactSizeIterator<Item = Batch> {
        let available = (self.validation.len() - 1) / context;
        let count = available.min(VALIDATION_SEQUENCES);
        let starts: Vec<_> = (0..count)
            .map(|i| i * available / count * context)
            .collect();
        let chunks: Vec<_> = starts.chunks(sequences).map(<[_]>::to_vec).collect();
        chunks
            .into_iter()
            .map(move |starts| Batch::cut(&self.validation, starts, context))
    }
}

impl Batch {
    fn cut(text: &[u8], starts: impl IntoIterator<Item = usize>, context: usize) -> Self {
        let mut batch = Self {
            inputs: Vec::new(),
            targets: Vec::new(),
            context,
        };
        for start in starts {
            let tokens = &text[start..=start + context];
            batch
                .inputs
                .extend(tokens[..context].iter().copied().map(i32::from));
            batch
                .targets
                .extend(tokens[1..].iter().copied().map(i32::from));
        }
        batch
    }

    /// Number of tokens to predict.
    pub fn tokens(&self) -> usize {
        self.targets.len()
    }

    /// Inputs and targets as tensors of shape `[sequences, context]`.
    pub fn into_tensors(self, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let shape = [self.inputs.len() / self.context, self.context];
        let tensor = |tokens| Tensor::from_data(TensorData::new(tokens, shape), device);
        (tensor(self.inputs), tensor(self.targets))
    }
}

/// The Markdown files of the crates that cargo has unpacked, in the order of their names.
///
/// Every machine that can build this example has them, whatever else it lacks.
fn read_registry() -> Result<Vec<u8>> {
    let hint = "give the text to train on with --data PATH";
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .with_context(|| format!("there is neither a CARGO_HOME nor a home directory: {hint}"))?;
    let sources = cargo_home.join("registry").join("src");

    let mut files = Vec::new();
    // One directory for each registry; its name holds a hash that differs between machines.
    for registry in fs::read_dir(&sources).into_iter().flatten().flatten() {
        let root = registry.path();
        collect_files(&root, &mut |path| {
            if path.extension().is_some_and(|extension| extension == "md")
                && let Ok(name) = path.strip_prefix(&root)
            {
                files.push((name.to_owned(), path.to_owned()));
            }
        })?;
    }
    files.sort();
    files.dedup_by(|a, b| a.0 == b.0);

    let mut text = Vec::new();
    for (_, path) in files {
        if text.len() >= REGISTRY_LIMIT {
            break;
        }
        append_file(&mut text, &path)?;
    }
    text.truncate(REGISTRY_LIMIT);
    ensure!(
        !text.is_empty(),
        "found no Markdown files in {}: {hint}",
        sources.display()
    );
    Ok(text)
}

/// The file at `path`, or all text files below it in the order of their names.
fn read_text(path: &Path) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    if path.is_dir() {
        let mut files = Vec::new();
        collect_files(path, &mut |path| files.push(path.to_owned()))?;
        files.sort();
        for file in files {
            append_file(&mut text, &file)?;
        }
        ensure!(!text.is_empty(), "the directory holds no text files");
    } else {
        text = fs::read(path)?;
    }
    Ok(text)
}

/// Append the file at `path` if it holds UTF-8 text.
fn append_file(text: &mut Vec<u8>, path: &Path) -> Result<()> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if std::str::from_utf8(&bytes).is_ok() {
        text.extend(bytes);
        text.push(b'\n');
    }
    Ok(())
}

/// Visit the regular files below `directory`, leaving out links, which could lead in circles.
fn collect_files(directory: &Path, visit: &mut impl FnMut(&Path)) -> Result<()> {
    let failed = || format!("cannot list {}", directory.display());
    for entry in fs::read_dir(directory).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let kind = entry.file_type().with_context(failed)?;
        if kind.is_dir() {
            collect_files(&entry.path(), visit)?;
        } else if kind.is_file() {
            visit(&entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(bytes: usize, context: usize) -> Result<Corpus> {
        Corpus::split((0..bytes).map(|i| i as u8).collect(), context)
    }

    #[test]
    fn the_end_of_the_text_is_held_out() {
        let corpus = corpus(1000, 8).unwrap();
        assert_eq!(corpus.sizes(), (950, 50));
        assert_eq!(corpus.validation[0], 950usize as u8);
    }

    #[test]
    fn short_texts_are_refused() {
        assert!(corpus(0, 8).is_err());
        assert!(corpus(20 * 8, 8).is_err());
        assert!(corpus(20 * 9, 8).is_ok());
    }

    #[test]
    fn targets_are_the_inputs_one_later() {
        let corpus = corpus(1000, 8).unwrap();
        for batch in corpus.validation(4, 8).chain([corpus.batch(1, 2, 3, 8)]) {
            for (input, target) in batch.inputs.iter().zip(&batch.targets) {
                assert_eq!((input + 1) % 256, *target);
            }
        }
        // 49 positions that have a successor hold 6 sequences of 8.
        assert_eq!(
            corpus
                .validation(4, 8)
                .map(|batch| batch.tokens())
                .sum::<usize>(),
            48
        );
    }

    #[test]
    fn batches_depend_on_seed_and_index_alone() {
        let corpus = corpus(100_000, 8).unwrap();
        let inputs = |seed, index| corpus.batch(seed, index, 4, 8).inputs;
        assert_eq!(inputs(1, 7), inputs(1, 7));
        assert_ne!(inputs(1, 7), inputs(1, 8));
        assert_ne!(inputs(1, 7), inputs(2, 7));
    }

    #[test]
    fn directories_are_read_in_order_and_binary_files_left_out() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        fs::write(dir.path().join("c.txt"), "last").unwrap();
        fs::write(dir.path().join("b").join("x.txt"), "middle").unwrap();
        fs::write(dir.path().join("a.txt"), "first").unwrap();
        fs::write(dir.path().join("image"), [0xff, 0xfe]).unwrap();
        assert_eq!(read_text(dir.path()).unwrap(), b"first\nmiddle\nlast\n");
    }
}
