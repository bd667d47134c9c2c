# Sourced by the scripts that run on a bare card machine, from the repository's root: unpacks what was
# carried there (.whl: wheels, .built: FlashInfer kernels built ahead) and puts the package on the path.
# Under lanes.sh the machine is ready and $OUT is the lane's own.
[ -z "$ZIPAGE_CARD_READY" ] || return 0
site=/tmp/site
package=/tmp/package
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" .whl/*.whl || exit 1
if [ -d .built/flashinfer ]; then
    mkdir -p "$site/flashinfer/data/aot"
    cp -r .built/flashinfer/. "$site/flashinfer/data/aot/"
fi
# The rooms are folders of the root but subpackages of zipage_lang; the root itself stays off the path.
rm -rf "$package" && mkdir -p "$package"
cp -r zipage_lang "$package/"
cp -r frontend kernels radix_cache runtime "$package/zipage_lang/"
export PYTHONPATH="$package:$site"
export ZIPAGE_KERNELS="$PWD/.built/zipage"
export PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
