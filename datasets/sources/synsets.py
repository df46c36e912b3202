"""Folders of ImageNet and Caltech-256 -> VOC classes: which of their images the single-label source may take.

Chosen by VOC's annotation guidelines, which say what counts as each class: tricycles and unicycles are bicycles, ships
are boats, vans are cars but emergency vehicles and lorries are not, cats and dogs are domestic, tables are for eating
at, mopeds and scooters are motorbikes, sheep are no goats, carriages are trains but trams are not. Left out is what
shows several things (desktop computer, horse cart, aircraft carrier), a part of one (car wheel) or leaves doubt
(pickup, pill bottle, dingo, picnic table).
"""

_IMAGENET = {
    "aeroplane": "n02690373 airliner, n04552348 warplane, n02691156 airplane",
    "bicycle": """n02835271 bicycle-built-for-two, n03792782 mountain bike, n04482393 tricycle, n04509417 unicycle,
        n02834778 bicycle""",
    "bird": """n01514668 cock, n01514859 hen, n01518878 ostrich, n01530575 brambling, n01531178 goldfinch,
        n01532829 house finch, n01534433 junco, n01537544 indigo bunting, n01558993 robin, n01560419 bulbul,
        n01580077 jay, n01582220 magpie, n01592084 chickadee, n01601694 water ouzel, n01608432 kite,
        n01614925 bald eagle, n01616318 vulture, n01622779 great gray owl, n01795545 black grouse,
        n01796340 ptarmigan, n01797886 ruffed grouse, n01798484 prairie chicken, n01806143 peacock, n01806567 quail,
        n01807496 partridge, n01817953 African gray, n01818515 macaw, n01819313 sulphur-crested cockatoo,
        n01820546 lorikeet, n01824575 coucal, n01828970 bee eater, n01829413 hornbill, n01833805 hummingbird,
        n01843065 jacamar, n01843383 toucan, n01847000 drake, n01855032 red-breasted merganser, n01855672 goose,
        n01860187 black swan, n02002556 white stork, n02002724 black stork, n02006656 spoonbill, n02007558 flamingo,
        n02009229 little blue heron, n02009912 American egret, n02011460 bittern, n02012849 crane, n02013706 limpkin,
        n02017213 European gallinule, n02018207 American coot, n02018795 bustard, n02025239 ruddy turnstone,
        n02027492 red-backed sandpiper, n02028035 redshank, n02033041 dowitcher, n02037110 oystercatcher,
        n02051845 pelican, n02056570 king penguin, n02058221 albatross, n01503061 bird""",
    "boat": """n02951358 canoe, n02981792 catamaran, n03095699 container ship, n03344393 fireboat, n03447447 gondola,
        n03662601 lifeboat, n03673027 liner, n03947888 pirate, n04147183 schooner, n04273569 speedboat,
        n04483307 trimaran, n04612504 yawl, n04530566 watercraft""",
    "bottle": "n02823428 beer bottle, n03983396 pop bottle, n04557648 water bottle, n04591713 wine bottle, "
    "n02876657 bottle",
    "bus": "n03769881 minibus, n04146614 school bus, n04487081 trolleybus, n02924116 bus",
    "car": """n02814533 beach wagon, n02930766 cab, n03100240 convertible, n03594945 jeep, n03670208 limousine,
        n03770679 minivan, n03777568 Model T, n04037443 racer, n04285008 sports car, n02958343 car""",
    "cat": """n02123045 tabby, n02123159 tiger cat, n02123394 Persian cat, n02123597 Siamese cat,
        n02124075 Egyptian cat, n02121808 domestic cat""",
    "chair": """n02791124 barber chair, n03376595 folding chair, n04099969 rocking chair, n04429376 throne,
        n03001627 chair""",
    "cow": "n02403003 ox, n02402425 cattle",
    "diningtable": "n03201208 dining table",
    "dog": """n02085620 Chihuahua, n02085782 Japanese spaniel, n02085936 Maltese dog, n02086079 Pekinese,
        n02086240 Shih-Tzu, n02086646 Blenheim spaniel, n02086910 papillon, n02087046 toy terrier,
        n02087394 Rhodesian ridgeback, n02088094 Afghan hound, n02088238 basset, n02088364 beagle,
        n02088466 bloodhound, n02088632 bluetick, n02089078 black-and-tan coonhound, n02089867 Walker hound,
        n02089973 English foxhound, n02090379 redbone, n02090622 borzoi, n02090721 Irish wolfhound,
        n02091032 Italian greyhound, n02091134 whippet, n02091244 Ibizan hound, n02091467 Norwegian elkhound,
        n02091635 otterhound, n02091831 Saluki, n02092002 Scottish deerhound, n02092339 Weimaraner,
        n02093256 Staffordshire bullterrier, n02093428 American Staffordshire terrier, n02093647 Bedlington terrier,
        n02093754 Border terrier, n02093859 Kerry blue terrier, n02093991 Irish terrier, n02094114 Norfolk terrier,
        n02094258 Norwich terrier, n02094433 Yorkshire terrier, n02095314 wire-haired fox terrier,
        n02095570 Lakeland terrier, n02095889 Sealyham terrier, n02096051 Airedale, n02096177 cairn,
        n02096294 Australian terrier, n02096437 Dandie Dinmont, n02096585 Boston bull, n02097047 miniature schnauzer,
        n02097130 giant schnauzer, n02097209 standard schnauzer, n02097298 Scotch terrier, n02097474 Tibetan terrier,
        n02097658 silky terrier, n02098105 soft-coated wheaten terrier, n02098286 West Highland white terrier,
        n02098413 Lhasa, n02099267 flat-coated retriever, n02099429 curly-coated retriever,
        n02099601 golden retriever, n02099712 Labrador retriever, n02099849 Chesapeake Bay retriever,
        n02100236 German short-haired pointer, n02100583 vizsla, n02100735 English setter, n02100877 Irish setter,
        n02101006 Gordon setter, n02101388 Brittany spaniel, n02101556 clumber, n02102040 English springer,
        n02102177 Welsh springer spaniel, n02102318 cocker spaniel, n02102480 Sussex spaniel,
        n02102973 Irish water spaniel, n02104029 kuvasz, n02104365 schipperke, n02105056 groenendael,
        n02105162 malinois, n02105251 briard, n02105412 kelpie, n02105505 komondor, n02105641 Old English sheepdog,
        n02105855 Shetland sheepdog, n02106030 collie, n02106166 Border collie, n02106382 Bouvier des Flandres,
        n02106550 Rottweiler, n02106662 German shepherd, n02107142 Doberman, n02107312 miniature pinscher,
        n02107574 Greater Swiss Mountain dog, n02107683 Bernese mountain dog, n02107908 Appenzeller,
        n02108000 EntleBucher, n02108089 boxer, n02108422 bull mastiff, n02108551 Tibetan mastiff,
        n02108915 French bulldog, n02109047 Great Dane, n02109525 Saint Bernard, n02109961 Eskimo dog,
        n02110063 malamute, n02110185 Siberian husky, n02110341 dalmatian, n02110627 affenpinscher, n02110806 basenji,
        n02110958 pug, n02111129 Leonberg, n02111277 Newfoundland, n02111500 Great Pyrenees, n02111889 Samoyed,
        n02112018 Pomeranian, n02112137 chow, n02112350 keeshond, n02112706 Brabancon griffon, n02113023 Pembroke,
        n02113186 Cardigan, n02113624 toy poodle, n02113712 miniature poodle, n02113799 standard poodle,
        n02113978 Mexican hairless, n02084071 dog""",
    "horse": "n02389026 sorrel, n02374451 horse",
    "motorbike": "n03785016 moped, n03791053 motor scooter, n03790512 motorcycle",
    "person": "n09835506 ballplayer, n10148035 groom, n10565667 scuba diver, n00007846 person",
    "pottedplant": "n03991062 pot",
    "sheep": "n02412080 ram, n02415577 bighorn, n02411705 sheep",
    "sofa": "n04344873 studio couch, n04256520 sofa",
    "train": """n02917067 bullet train, n03272562 electric locomotive, n03393912 freight car, n03895866 passenger car,
        n04310018 steam locomotive, n04468005 train""",
    "tvmonitor": "n03782006 monitor, n04152593 screen, n04404412 television, n03211117 display",
}

_CALTECH = {
    "aeroplane": "069.fighter-jet 251.airplanes-101",
    "bicycle": "146.mountain-bike 224.touring-bike 229.tricycle",
    "bird": """049.cormorant 060.duck 089.goose 113.hummingbird 114.ibis-101 151.ostrich 152.owl 158.penguin
        207.swan""",
    "boat": "030.canoe 122.kayak 123.ketch-101 197.speed-boat",
    "bottle": "246.wine-bottle",
    "bus": "178.school-bus",
    "car": "252.car-side-101",
    "dog": "056.dog 254.greyhound",
    "horse": "105.horse",
    "motorbike": "145.motorbikes-101",
    "person": "159.people 253.faces-easy-101",
    "pottedplant": "015.bonsai-101",
    "tvmonitor": "046.computer-monitor",
}

IMAGENET = {text.split()[0]: name for name, synsets in _IMAGENET.items() for text in synsets.split(",")}
"""WordNet id -> VOC class, for the synsets of ILSVRC-2012's 1,000 that are one, and, last in each line above, for the
general one (n02084071, dog) that lists of other ImageNet subsets name."""

CALTECH = {folder: name for name, folders in _CALTECH.items() for folder in folders.split()}
"""Folder of Caltech-256 -> VOC class. It has nothing for cat, chair, cow, diningtable, sheep, sofa and train."""
